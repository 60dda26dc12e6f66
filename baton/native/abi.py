"""The structs and functions of src/model.h, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Element types."""


def _fields(pointers: str = "", integers: str = "") -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in pointers.split()] + [(name, c_int64) for name in integers.split()]


class Layer(ctypes.Structure):
    """BatonLayer."""

    _fields_ = _fields(
        "attention_norm q_norm k_norm mlp_norm qkv o gate up down qkv_bias o_bias gate_bias up_bias down_bias", "window"
    )


class Model(ctypes.Structure):
    """BatonModel."""

    _fields_ = [
        *_fields(integers="layers hidden inner vocab heads kv_heads head_dim type"),
        ("eps", c_double),
        *_fields("layer embedding head norm frequencies"),
    ]


class Kv(ctypes.Structure):
    """BatonKv."""

    _fields_ = _fields("keys values", "pages page_size type")


class Batch(ctypes.Structure):
    """BatonBatch."""

    _fields_ = [
        ("sequences", c_int64),
        ("query_lens", POINTER(c_int32)),
        ("context_lens", POINTER(c_int32)),
        ("tables", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
    ]


class Call(ctypes.Structure):
    """BatonCall."""

    _fields_ = [
        ("threads", c_int64),
        ("token_ids", c_void_p),
        *_fields(integers="first last tail"),
        *_fields("hidden logits best"),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of the library's functions."""
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "room_new": (c_void_p, ()),
        "room_free": (None, (c_void_p,)),
        "forward": (c_int, (POINTER(Model), POINTER(Kv), POINTER(Batch), POINTER(Call), c_void_p)),
        "attend": (
            c_int,
            (POINTER(Model), POINTER(Kv), POINTER(Batch), c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        ),
        "head": (c_int, (POINTER(Model), c_int64, POINTER(Call), c_void_p)),
        "error": (c_char_p, ()),
        "packed_size": (c_int64, (c_int64, c_int64)),
        "pack": (None, (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64)),
        "linear": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
        "lowest_noise": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64)),
        "start": (c_int, (c_int64,)),
        "pin": (None, (POINTER(c_int32), c_int64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"baton_native_{name}")
        function.restype, function.argtypes = result, arguments
