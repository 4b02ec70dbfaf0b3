# The proxy without replicas. The tests do not build it: their machines have no container runtime.
#   docker build -t omni-proxy . && docker run -p 30000:30000 -v ./proxy.toml:/etc/omni-proxy/proxy.toml omni-proxy
# In proxy.toml: host = "0.0.0.0", and access_log = "-" so that `docker logs` has it.

FROM python:3.11-slim AS build
# Optional dependencies, such as "[replica]" or "[kv-events,otel]".
ARG EXTRAS=""
COPY pyproject.toml README.md LICENSE /source/
COPY omni_proxy /source/omni_proxy
RUN python -m venv /opt/omni-proxy && /opt/omni-proxy/bin/pip install --no-cache-dir "/source$EXTRAS"

FROM python:3.11-slim
COPY --from=build /opt/omni-proxy /opt/omni-proxy
ENV PATH=/opt/omni-proxy/bin:$PATH
# Workers that are added over HTTP are kept beside the file.
RUN useradd --system omni-proxy && install -d -o omni-proxy /etc/omni-proxy /var/lib/omni-proxy /models
USER omni-proxy
EXPOSE 30000
# Liveness only (/live): a restart fixes neither unavailable workers nor an invalid file. For another [server] port
# set HEALTH_PORT.
ENV HEALTH_PORT=30000
HEALTHCHECK CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:%s/live' % os.environ['HEALTH_PORT'], timeout=3)"]
# No shell in between: SIGTERM must reach the proxy, which then drains (docker stop --time 130).
ENTRYPOINT ["omni-proxy"]
CMD ["--config", "/etc/omni-proxy/proxy.toml"]
