"""`python -m virtual_gpu.models`: the models that are known without the hub, a name a line."""

from .bundled import architectures, variants

if __name__ == "__main__":
    print(*architectures(), *variants(), sep="\n")
