# The relay as an image: a user of its own, a read-only root if you like, state in one volume.
# Build: docker build -t localhost/imds-relay .
#    or: buildah build --format docker -t localhost/imds-relay .
# `make pin-images` writes the digest of the base image behind its tag.
# Run: see docker-compose.yml

ARG PYTHON=docker.io/library/python:3.13-slim-trixie

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY requirements/run.lock requirements/build.lock requirements/
RUN python -m venv /opt/imds-relay \
 && /opt/imds-relay/bin/python -m pip install --require-hashes -r requirements/run.lock \
 && python -m pip install --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY relay relay
RUN python -m hatchling build --target wheel --directory /wheel \
 && /opt/imds-relay/bin/python -m pip install --no-deps /wheel/*.whl \
 && /opt/imds-relay/bin/python -m pip uninstall --yes pip

FROM ${PYTHON}
COPY --from=build /opt/imds-relay /opt/imds-relay
# A fixed number, so that rights on volumes mean the same everywhere.
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/imds-relay
USER 10001:10001
ENV PATH=/opt/imds-relay/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    IMDS_RELAY_STORE__PATH=/var/lib/imds-relay/relay.db
WORKDIR /var/lib/imds-relay
VOLUME /var/lib/imds-relay
EXPOSE 8080
STOPSIGNAL SIGTERM
# Asks the default port without TLS. With another api.listen, give a check of your own.
# Images in OCI format have no health check: podman and buildah keep it with --format docker.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["python", "-c", "\
from http.client import HTTPConnection as Connection; \
ask = Connection('127.0.0.1', 8080, timeout=4); \
ask.request('GET', '/healthz'); \
raise SystemExit(ask.getresponse().status != 200)"]
ENTRYPOINT ["imds-relay"]
CMD ["run"]
