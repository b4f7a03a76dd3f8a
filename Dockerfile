# One image for every process of a run: syncer, learners, relays, evaluators. What it is for: docs/kubernetes.md.
#
#     docker build --tag atoll .
#     docker run --rm --read-only --tmpfs /tmp atoll atoll doctor
#
# It runs as a user without rights, on a root file system that nobody can write: only /tmp has to be writable, and the
# folder that a command writes to. Your own dependencies: an image FROM this one, with USER root for its RUN pip install.

FROM python:3.12-slim

# Where packages come from, if not from where pip looks by itself: another index, or that of torch's smaller CPU build.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

WORKDIR /opt/atoll/source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/atoll/venv && \
    /opt/atoll/venv/bin/python -m pip install --no-cache-dir -c constraints.txt '.[torch,plots,store]'

# The kernels, compiled once here: start.sh copies them to where numba may write. On another kind of processor than the
# one that built the image they are compiled again, in half a minute.
RUN NUMBA_CACHE_DIR=/opt/atoll/kernels /opt/atoll/venv/bin/python -c 'from atoll.numerics import kernels; kernels.warm()'
COPY examples/deploy/container/start.sh /opt/atoll/start.sh

ENV PATH=/opt/atoll/venv/bin:$PATH
ENV NUMBA_CACHE_DIR=/tmp/atoll-kernels
ENV HOME=/tmp
ENV PYTHONDONTWRITEBYTECODE=1
ENV PYTHONUNBUFFERED=1

WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["/opt/atoll/start.sh"]
CMD ["atoll", "--help"]
