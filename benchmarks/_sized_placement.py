"""A placement process with room in its index for a given fleet, which its settings do not offer.

python -m benchmarks._sized_placement WORKERS BLOCKS FLAGS...
"""

from __future__ import annotations

import sys
from functools import partial

from services.placement import core, main
from services.placement.index.kv_indexer import KvIndexer

if __name__ == "__main__":
    workers, blocks = map(int, sys.argv[1:3])
    core.KvIndexer = partial(KvIndexer, max_blocks=blocks, max_workers=workers)  # type: ignore[misc,assignment]
    main.main(sys.argv[3:])
