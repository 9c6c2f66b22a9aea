# The pipeline with the versions of constraints.txt. The wheel of torch brings CUDA; the host needs NVIDIA's driver.
#   docker build -t rlhf .
#   docker run --rm rlhf
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/workspace" rlhf train --actor-model opt-1.3b --reward-model opt-350m --deployment-type single_node
FROM python:3.11-slim

# g++: for --torch-compile, and for DeepSpeed's optimizer on the CPU
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# A package index for another build of torch: --build-arg TORCH_INDEX=URL
ARG TORCH_INDEX=
COPY . /opt/rlhf
# torch comes first: DeepSpeed looks for it when it is built
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' /opt/rlhf/constraints.txt)" \
    && pip install --no-cache-dir -c /opt/rlhf/constraints.txt "/opt/rlhf[gguf,sentiment,tensorboard]"

WORKDIR /workspace
ENTRYPOINT ["rlhf"]
# without words: the demo
CMD ["train"]
