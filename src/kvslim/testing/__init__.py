"""Conformance suites for codecs and recipes, for anyone's own tests; they need neither pytest nor hypothesis.

>>> from kvslim.testing import check_codec, check_recipe
>>> check_codec(MyCodec(bits=3))
>>> check_recipe("k=rotate/mycodec:3+v=mycodec:4")
"""

from __future__ import annotations

from kvslim.errors import ConformanceError
from kvslim.testing.codec import check_codec
from kvslim.testing.recipe import check_recipe

__all__ = ["ConformanceError", "check_codec", "check_recipe"]
