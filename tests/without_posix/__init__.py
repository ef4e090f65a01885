"""For a process that should lack what Python lacks on Windows."""
