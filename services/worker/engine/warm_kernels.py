"""`python -m kvfleet.worker.engine.warm_kernels`: compile a CPU worker's kernels when an image is built.

They go to XDG_CACHE_HOME; `kvservice.kernel_cache` tells how a worker finds them.
"""

from __future__ import annotations

import sys

from kvfleet.worker.blocks import block_codec
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.model.model_folder import resolve_model
from kvfleet.worker.settings import WorkerSettings
from kvservice.settings import load

FLAGS = ("--model=demo", "--device=cpu", "--blocks=128", "--host-bytes=0")


def main() -> None:
    settings = load(WorkerSettings, FLAGS, "kvfleet worker")
    folder = resolve_model(settings.model)
    bundle = read_bundle(folder, settings.model, load_format="auto", dtype="auto", block_size=settings.block_size)
    build_engine(settings, folder, bundle)
    block_codec.warm_up()
    sys.stderr.write("the kernels are compiled\n")


if __name__ == "__main__":
    main()
