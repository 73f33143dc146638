# A speculator: a drafter, with or without an SSM.
# The context is the repository's root. TORCH names the folder of deploy/docker/wheels that pip looks into first:
# cpu for a CPU build of torch laid there, gpu for the index's own.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=cpu
WORKDIR /build
RUN python -m venv /opt/graftree
ENV PATH=/opt/graftree/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
COPY deploy/docker/wheels/${TORCH} wheels
RUN python requirements.py engine tracing > requirements.txt \
    && pip install --no-compile --find-links wheels -c constraints.txt -r requirements.txt
COPY README.md LICENSE deploy/docker/strip.py ./
COPY graftree graftree
COPY kernels kernels
COPY speculator_service speculator_service
RUN pip install --no-compile --no-deps . \
    && python strip.py

FROM ${PYTHON_IMAGE}
ARG TORCH=cpu
# Triton compiles its launchers when it first runs.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp graftree \
    && install -d -o 10001 -g 10001 /models \
    && if [ "$TORCH" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
ENV PATH=/opt/graftree/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    GRAFTREE_HOST=0.0.0.0 GRAFTREE_PORT=8200 GRAFTREE_CACHE=/models HF_HOME=/models/hub
COPY deploy/docker/probe.py /opt/probe.py
COPY --from=build /opt/graftree /opt/graftree
USER 10001:10001
EXPOSE 8200
ENTRYPOINT ["python", "-m", "speculator_service"]
