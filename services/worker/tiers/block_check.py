"""Whether a block that came over the wire is the one that was asked for, and one that this worker can use. Pure."""

from __future__ import annotations

from kvfleet.worker.tiers.base import BlockName
from kvfleet.worker.tiers.codecs.block_shape import BlockShape, encoded_bytes
from kvproto.dataplane.block import BlockCodec, BlockHeader

FOREIGN = "foreign"  # of a pool of another layout or dtype: workers of one model may differ in that


def fault_of(header: BlockHeader, name: BlockName, kv_format: bytes, shape: BlockShape, *, exact: bool) -> str:
    """ "" if there is none, else a metric's label. The checksum is the data plane's to check.

    The hash of `name` is that of its ids after its parent, so a header with the same fields is genuine. A name without
    ids is of a block whose tokens are not known here: then the header has to prove them.
    """
    if (header.root, header.hash, header.parent) != (name.root, name.hash, name.parent):
        return "other"
    if header.ids != name.ids and (name.ids or not header.is_genuine()):
        return "other"
    if header.format != kv_format:
        return FOREIGN
    if header.raw_bytes != shape.raw_bytes:
        return "format"
    quantised = header.codec is not BlockCodec.RAW
    if quantised and (shape.dtype == "int8" or not header.lossy):
        return "format"
    if header.length != encoded_bytes(header.codec, shape):
        return "format"
    return "lossy" if exact and header.lossy else ""
