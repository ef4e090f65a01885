import time, os
L=[]
def m(n):
    L.append((n,time.monotonic_ns()))
    if len(L)>=300: dump()
def dump():
    with open(f"/tmp/w/marks.{os.getpid()}","a") as f:
        for n,t in L: print(n,t,file=f)
    L.clear()
