# Planning, emulation and comparison, without torch, with compiled kernels.
# docker build -t pipeloom . && docker run --rm pipeloom compare vlm-m --cluster 64xH100
#
# To train, start from an image with torch (BASE=pytorch/pytorch:...), and the same lines add Pipeloom to it.
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir /src && rm -rf /src
# Kernels run on any processor of this architecture, and are only read.
ENV NUMBA_CPU_NAME=generic PIPELOOM_KERNELS=/opt/kernels
RUN NUMBA_CACHE_DIR=/opt/kernels pipeloom warmup && pipeloom warmup --check
ENTRYPOINT ["pipeloom"]
