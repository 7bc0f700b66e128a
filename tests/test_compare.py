"""The table made of several evaluations."""

import json

import pytest

from kvslim.errors import InputError
from kvslim.eval.compare import markdown, read_rows


def write(path, model, **recipes):
    rows = [
        {
            "recipe": name,
            "bits_per_value": 5.5,
            "bits_per_value_packed": 4.25,
            "kl_mean": kl,
            "kl_trimmed": kl / 2,
            "top1": 0.97,
        }
        for name, kl in recipes.items()
    ]
    path.write_text(json.dumps({"model": model, "rows": rows}))
    return path


def test_models_stand_beside_each_other_and_later_files_win(tmp_path):
    files = [
        write(tmp_path / "a.json", "small", slim4=0.5, int8=0.25),
        write(tmp_path / "b.json", "small", slim4=0.125),
        write(tmp_path / "c.json", "large", slim4=0.0625),
    ]
    lines = markdown(read_rows(files)).splitlines()
    assert lines[0].count("small") == lines[0].count("large") == 1
    assert lines[2] == ("| `slim4` | 5.50 / 4.25 | 0.1250 | 0.0625 | 0.970 | 5.50 / 4.25 | 0.0625 | 0.0312 | 0.970 |")
    assert lines[3] == "| `int8` | 5.50 / 4.25 | 0.2500 | 0.1250 | 0.970 |  |  |  |  |"


def test_foreign_and_missing_files_are_refused_by_name(tmp_path):
    foreign = tmp_path / "foreign.json"
    foreign.write_text("[1, 2]")
    with pytest.raises(InputError, match="foreign.json is not a result"):
        read_rows([foreign])
    with pytest.raises(InputError, match="cannot read"):
        read_rows([tmp_path / "absent.json"])
