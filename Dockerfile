# Two images: `operator` (no torch) and `runtime` (frontends, engines, fetch and profile jobs).
#
#   docker build --target operator -t foveal/operator:0.1.0 .
#   docker build --target runtime  -t foveal/runtime:0.1.0 .
#
# Another base: --build-arg BASE=... (Debian with Python 3.11 or newer, venv and pip). The base's
# own pip installs, so that the virtual environment needs none. Settings of the builder's package
# indexes come in as bind mounts (-v pip.conf:/etc/pip.conf:ro), never as ARG: consumed arguments
# land in the image's history. Reproducible: pass a fixed SOURCE_DATE_EPOCH and let the builder
# rewrite time stamps (buildah --timestamp, buildx rewrite-timestamp=true). Pins are copied, not
# mounted: not every builder makes a step anew when what it mounts has changed.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# --- what both have ---------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${BASE} AS base
ARG SOURCE_DATE_EPOCH=1767225600
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
# A passwd entry: some libraries ask for the user's name.
RUN groupadd --gid 10001 foveal \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin foveal \
    && python3 -m venv --without-pip /opt/venv

# --- wheels of Foveal, with the C kernel compiled ---------------------------------------------
FROM base AS wheels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/build.txt /src/requirements/
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --require-hashes -r /src/requirements/build.txt
WORKDIR /src
COPY runtime /src/runtime
RUN FOVEAL_REQUIRE_KERNELS=1 /opt/tools/bin/pip wheel --no-deps --no-build-isolation \
    --wheel-dir /wheels ./runtime
COPY operator /src/operator
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./operator

# --- operator ---------------------------------------------------------------------------------
FROM base AS operator-files
COPY requirements/operator.txt /opt/requirements/
RUN pip --python /opt/venv/bin/python install --require-hashes -r /opt/requirements/operator.txt
COPY --from=wheels /wheels/ /opt/wheels/
RUN pip --python /opt/venv/bin/python install --no-deps --no-index /opt/wheels/*.whl

# What is installed, by a tool that is not installed.
FROM operator-files AS operator-sbom
COPY --from=wheels /opt/tools /opt/tools
RUN /opt/tools/bin/cyclonedx-py environment /opt/venv/bin/python \
    --output-reproducible --output-file /opt/sbom.cdx.json

FROM operator-files AS operator
COPY --from=operator-sbom /opt/sbom.cdx.json /opt/venv/sbom.cdx.json
COPY LICENSE /opt/venv/LICENSE
LABEL org.opencontainers.image.title="foveal-operator" \
      org.opencontainers.image.description="Reconciles MultiModalInference resources" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["foveal-operator"]

# --- runtime ----------------------------------------------------------------------------------
FROM base AS runtime-files
# OpenMP for the C kernel, and an init that reaps media workers and passes SIGTERM on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 tini \
    && rm -rf /var/lib/apt/lists/*
# The largest and slowest layer first: a change of code leaves it and the next one alone.
COPY requirements/torch.txt /opt/requirements/
RUN pip --python /opt/venv/bin/python install --require-hashes -r /opt/requirements/torch.txt
COPY requirements/runtime.txt /opt/requirements/
RUN pip --python /opt/venv/bin/python install --require-hashes -r /opt/requirements/runtime.txt
COPY --from=wheels /wheels/foveal_runtime-*.whl /opt/wheels/
# Pods name the command; the one they find first on the path starts the init.
RUN pip --python /opt/venv/bin/python install --no-deps --no-index /opt/wheels/*.whl \
    && mkdir -p /opt/init \
    && printf '#!/bin/sh\nexec tini -- /opt/venv/bin/foveal-runtime "$@"\n' > /opt/init/foveal-runtime \
    && chmod 0755 /opt/init/foveal-runtime

FROM runtime-files AS runtime-sbom
COPY --from=wheels /opt/tools /opt/tools
RUN /opt/tools/bin/cyclonedx-py environment /opt/venv/bin/python \
    --output-reproducible --output-file /opt/sbom.cdx.json

FROM runtime-files AS runtime
COPY --from=runtime-sbom /opt/sbom.cdx.json /opt/venv/sbom.cdx.json
COPY LICENSE /opt/venv/LICENSE
ENV PATH=/opt/init:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
LABEL org.opencontainers.image.title="foveal-runtime" \
      org.opencontainers.image.description="Frontends and engines of Foveal" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 5570 5580
ENTRYPOINT ["foveal-runtime"]
