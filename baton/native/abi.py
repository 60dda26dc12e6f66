"""The structs and functions of src/model.h, collective.h and channel.h, for ctypes; these explain fields and units."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Element types."""


def _fields(pointers: str = "", integers: str = "") -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in pointers.split()] + [(name, c_int64) for name in integers.split()]


class BatonLayer(ctypes.Structure):
    """Weights and window of one layer."""

    _fields_ = _fields(
        "attention_norm q_norm k_norm mlp_norm qkv o gate up down qkv_bias o_bias gate_bias up_bias down_bias", "window"
    )


class BatonModel(ctypes.Structure):
    """Sizes of the model, and the addresses of its weights."""

    _fields_ = [
        *_fields(integers="layers hidden inner vocab heads kv_heads head_dim type"),
        ("eps", c_double),
        *_fields("layer embedding head norm frequencies"),
        ("rotary_factor", c_double),
        ("ranks", c_void_p),
    ]


class BatonKv(ctypes.Structure):
    """Pages of all layers: `keys` and `values` have one array a layer, `[pages, page_size, kv_heads, head_dim]`."""

    _fields_ = _fields("keys values", "pages page_size type")


class BatonBatch(ctypes.Structure):
    """Lengths and page tables of the sequences of a pass."""

    _fields_ = [
        ("sequences", c_int64),
        ("query_lens", POINTER(c_int32)),
        ("context_lens", POINTER(c_int32)),
        ("tables", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
    ]


class BatonCall(ctypes.Structure):
    """Inputs and outputs of one call."""

    _fields_ = [
        ("threads", c_int64),
        ("token_ids", c_void_p),
        *_fields(integers="first last"),
        ("sampled", POINTER(c_int32)),
        ("samples", c_int64),
        *_fields("hidden logits argmax"),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of the library's functions."""
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "workspace_new": (c_void_p, ()),
        "workspace_free": (None, (c_void_p,)),
        "workspace_size": (c_int64, (c_void_p,)),
        "forward": (c_int, (POINTER(BatonModel), POINTER(BatonKv), POINTER(BatonBatch), POINTER(BatonCall), c_void_p)),
        "attend": (
            c_int,
            (
                POINTER(BatonModel),
                POINTER(BatonKv),
                POINTER(BatonBatch),
                c_int64,
                c_int64,
                c_void_p,
                c_void_p,
                c_void_p,
            ),
        ),
        "head": (c_int, (POINTER(BatonModel), c_int64, POINTER(BatonCall), c_void_p)),
        "rank_floats": (c_int64, (c_int64,)),
        "collective_bytes": (c_int64, (c_int64, c_int64)),
        "collective_open": (c_void_p, (c_int, c_int64, c_int64, c_int64)),
        "collective_close": (None, (c_void_p,)),
        "collective_ranks": (c_void_p, (c_void_p,)),
        "all_reduce": (c_int, (c_void_p, c_void_p, c_int64)),
        "all_gather": (c_int, (c_void_p, c_void_p, c_int64, c_void_p)),
        "barrier": (c_int, (c_void_p,)),
        "collective_abort": (None, (c_void_p,)),
        "collective_aborted": (c_int, (c_void_p,)),
        "collective_reset": (None, (c_void_p,)),
        "collective_waited_ns": (c_int64, (c_void_p,)),
        "collective_calls": (c_int64, (c_void_p,)),
        "channel_bytes": (c_int64, (c_int64,)),
        "channel_open": (c_void_p, (c_int, c_int64)),
        "channel_close": (None, (c_void_p,)),
        "channel_send": (c_int, (c_void_p, c_void_p, c_int64)),
        "channel_receive": (c_int, (c_void_p, c_void_p, c_int64)),
        "channel_abort": (None, (c_void_p,)),
        "channel_aborted": (c_int, (c_void_p,)),
        "channel_reset": (None, (c_void_p,)),
        "channel_waited_ns": (c_int64, (c_void_p,)),
        "error": (c_char_p, ()),
        "packed_size": (c_int64, (c_int64, c_int64)),
        "pack": (None, (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64)),
        "linear": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
        "lowest_noise": (c_int, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64)),
        "start": (c_int, (c_int64,)),
        "tasks": (c_int64, ()),
        "pin": (None, (POINTER(c_int32), c_int64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"baton_native_{name}")
        function.restype, function.argtypes = result, arguments
