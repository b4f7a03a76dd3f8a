#!/bin/sh
# What a container of the Dockerfile runs first. numba wants to write beside the kernels that it finds, and the image
# cannot be written: they go to /tmp.
set -eu
[ -e "$NUMBA_CACHE_DIR" ] || cp -r /opt/atoll/kernels "$NUMBA_CACHE_DIR"
exec "$@"
