"""ctypes mirror of native/kvslim.h: structs field by field, and the numbers of dtypes and transform steps."""

from __future__ import annotations

import ctypes as c

import torch

ABI = 1

NONE, FP16, BF16, FP32, E8M0, E4M3, BOOL = range(7)
DTYPES = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32, torch.bool: BOOL}
PART_DTYPES = {"u8": E4M3, "fp16": FP16, "bf16": BF16, "fp32": FP32, "e8m0": E8M0, "e4m3": E4M3}

WEIGHT, HADAMARD, MATRIX, PERMUTE, MEAN, PAGE, EXPAND = range(1, 8)


class Part(c.Structure):
    """One tensor of a side in the pool."""

    _fields_ = (
        ("slabs", c.c_void_p),
        ("block_stride", c.c_int64),
        ("head_stride", c.c_int64),
        ("dtype", c.c_int32),
        ("count", c.c_int32),
    )


class Segment(c.Structure):
    """Channels that share a bit width."""

    _fields_ = (("width", c.c_int32), ("bits", c.c_int32), ("group", c.c_int32))


class Side(c.Structure):
    """How one side of a layer lies in the pool."""

    _fields_ = (
        ("head_dim", c.c_int32),
        ("width", c.c_int32),
        ("block", c.c_int32),
        ("segments", c.c_int32),
        ("segment", Segment * 2),
        ("code", Part),
        ("token", Part),
        ("zero", Part),
        ("channel", Part),
        ("offset", Part),
        ("scale", Part),
    )


class Step(c.Structure):
    """One transform."""

    _fields_ = (
        ("kind", c.c_int32),
        ("first", c.c_int32),
        ("width", c.c_int32),
        ("size", c.c_int32),
        ("data", c.c_void_p),
        ("stride", c.c_int64),
        ("pairs", c.c_void_p),
        ("frequency", c.c_void_p),
    )


class Row(c.Structure):
    """One sequence."""

    _fields_ = (
        ("key_steps", c.c_void_p),
        ("value_steps", c.c_void_p),
        ("key_step_count", c.c_int32),
        ("value_step_count", c.c_int32),
        ("key_table", c.c_void_p),
        ("value_table", c.c_void_p),
        ("blocks", c.c_void_p),
        ("valid", c.c_void_p),
        ("entries", c.c_int32),
        ("packed", c.c_int32),
        ("copied", c.c_int32),
        ("source", c.c_int32),
        ("sinks", c.c_int32),
        ("exact", c.c_int32),
        ("origin", c.c_int64),
        ("holes", c.c_void_p),
        ("hole_count", c.c_int32),
        ("key_unit", c.c_float),
        ("value_unit", c.c_float),
        ("reserved", c.c_int32),
    )


class Exact(c.Structure):
    """Keys and values as the model made them."""

    _fields_ = (
        ("key", c.c_void_p),
        ("value", c.c_void_p),
        ("key_row", c.c_int64),
        ("key_head", c.c_int64),
        ("key_token", c.c_int64),
        ("value_row", c.c_int64),
        ("value_head", c.c_int64),
        ("value_token", c.c_int64),
        ("key_dtype", c.c_int32),
        ("value_dtype", c.c_int32),
    )

    def point(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Point at tensors (rows, kv_heads, tokens, head_dim) whose channels lie next to each other."""
        self.key, self.value = key.data_ptr(), value.data_ptr()
        self.key_row, self.key_head, self.key_token, _ = key.stride()
        self.value_row, self.value_head, self.value_token, _ = value.stride()
        self.key_dtype, self.value_dtype = DTYPES[key.dtype], DTYPES[value.dtype]


class Attend(c.Structure):
    """One call of attention."""

    _fields_ = (
        ("key", Side),
        ("value", Side),
        ("slab_starts", c.c_void_p),
        ("slab_count", c.c_int32),
        ("kv_heads", c.c_int32),
        ("heads", c.c_int32),
        ("batch", c.c_int32),
        ("rows", c.c_void_p),
        ("stored", Exact),
        ("chunk", Exact),
        ("queries", c.c_int32),
        ("chunk_tokens", c.c_int32),
        ("query", c.c_void_p),
        ("query_row", c.c_int64),
        ("query_head", c.c_int64),
        ("query_token", c.c_int64),
        ("query_dtype", c.c_int32),
        ("out_dtype", c.c_int32),
        ("out", c.c_void_p),
        ("mask", c.c_void_p),
        ("mask_row", c.c_int64),
        ("mask_head", c.c_int64),
        ("mask_query", c.c_int64),
        ("mask_dtype", c.c_int32),
        ("causal", c.c_int32),
        ("length", c.c_int64),
        ("sinks", c.c_void_p),
        ("scaling", c.c_float),
        ("softcap", c.c_float),
    )


class Encode(c.Structure):
    """One call of the table encoder."""

    _fields_ = (
        ("x", c.c_void_p),
        ("x_block", c.c_int64),
        ("x_head", c.c_int64),
        ("x_token", c.c_int64),
        ("x_dtype", c.c_int32),
        ("blocks", c.c_int32),
        ("kv_heads", c.c_int32),
        ("tokens", c.c_int32),
        ("head_dim", c.c_int32),
        ("bits", c.c_int32),
        ("mean", c.c_int32),
        ("by_range", c.c_int32),
        ("fit", c.c_int32),
        ("search", c.c_int32),
        ("step_count", c.c_int32),
        ("steps", c.c_void_p),
        ("page", c.c_void_p),
        ("table", c.c_void_p),
        ("factor", c.c_void_p),
        ("diagonal", c.c_void_p),
        ("multiples", c.c_void_p),
        ("multiple_count", c.c_int32),
        ("nearby_count", c.c_int32),
        ("code", c.c_void_p),
        ("code_block", c.c_int64),
        ("code_head", c.c_int64),
        ("token", c.c_void_p),
        ("token_block", c.c_int64),
        ("token_head", c.c_int64),
        ("offset", c.c_void_p),
        ("offset_block", c.c_int64),
        ("offset_head", c.c_int64),
    )
