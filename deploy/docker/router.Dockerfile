# The router: the public edge. No torch, no model weights; the context is the repository's root.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
RUN python -m venv /opt/graftree
ENV PATH=/opt/graftree/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python requirements.py tracing > requirements.txt \
    && pip install --no-compile -c constraints.txt -r requirements.txt
COPY README.md LICENSE deploy/docker/strip.py ./
COPY graftree graftree
COPY router router
RUN pip install --no-compile --no-deps . \
    && python strip.py --router

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp graftree && install -d -o 10001 -g 10001 /models
ENV PATH=/opt/graftree/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    GRAFTREE_HOST=0.0.0.0 GRAFTREE_PORT=8000 GRAFTREE_CACHE=/models HF_HOME=/models/hub
COPY deploy/docker/probe.py /opt/probe.py
COPY --from=build /opt/graftree /opt/graftree
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python", "-m", "router"]
