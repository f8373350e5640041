# SPDX-License-Identifier: Apache-2.0
"""docs/layouts.md and its pictures are what the package draws."""

from __future__ import annotations

from tools.layout_drawings import FOLDER, PATH, page, pictures


def test_the_page_is_up_to_date():
    assert PATH.read_text(encoding="utf-8") == page(), "run `make layout-drawings`"


def test_the_pictures_are_up_to_date():
    written = {p.name: p.read_text(encoding="utf-8") for p in FOLDER.iterdir()}
    assert written == pictures(), "run `make layout-drawings`"
