# An image with distmp from this clone; it trains the quickstart on CPUs:
#   docker build --tag distmp . && docker run --rm distmp
# For GPUs, name the index of a CUDA build of torch, and give the container the GPUs:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --tag distmp .
#   docker run --rm --gpus all --shm-size 1g distmp
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} torch
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
RUN useradd --create-home distmp
USER distmp
WORKDIR /home/distmp
# A new volume that is mounted here gets the owner of this directory.
RUN mkdir runs
ENTRYPOINT ["distmp"]
CMD ["launch", "--", "--config", "preset:quickstart"]
