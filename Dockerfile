# The service of a trained run. Build: docker build -t dpcert .
# Run: docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs/mnist-dp-gaussian:/model:ro" dpcert
# (compose.yaml adds an API key and limits.) For PyTorch without CUDA, pass the address of its CPU wheels as PIP_EXTRA_INDEX_URL.
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,fast]' && useradd --system dpcert
USER dpcert
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["dpcert", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
