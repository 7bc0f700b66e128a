"""The codec keeps what every codec must, alone and in a recipe."""

import pytest
from kvslim_midrise import MidriseCodec

from kvslim.testing import check_codec, check_recipe


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codec(bits):
    check_codec(MidriseCodec(bits))


def test_recipe():
    check_recipe("k=rotate/midrise:4+v=midrise:3")
