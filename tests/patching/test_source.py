"""Definitions in source text: signature, line, and which changes alter the digest."""

from __future__ import annotations

import inspect
import textwrap
import zipfile
from pathlib import Path

import pytest

from megatron_overlap.patching.manifest import Verdict, digest_of, judge_source
from megatron_overlap.patching.source import (
    Definition,
    DirectoryTree,
    ImportedTree,
    Target,
    definitions,
    megatron_release,
)
from tests.patching.conftest import Packages

STOCK = '''
import functools


class Layer:
    """A layer."""

    def forward(self, x, scale=1.5, *, flag: bool = False, **kwargs) -> int:
        """Doubles."""
        if flag:
            # why
            return f"{x!r:>{10}} {{}}"
        return x * scale
'''


def find(folder: Path, source: str, qualname: str = "Layer.forward") -> Definition:
    (folder / "module.py").write_text(textwrap.dedent(source))
    (found,) = definitions(DirectoryTree(folder), Target("module", qualname))
    return found


def test_signature_has_defaults_and_no_annotations(tmp_path: Path) -> None:
    assert find(tmp_path, STOCK).signature == "(self, x, scale=1.5, *, flag=False, **kwargs)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# why", "# another reason, in more words"),
        ("            # why\n", ""),
        ('        """Doubles."""\n', '        """Doubles.\n\n        Often.\n        """\n'),
        ('        """Doubles."""\n', ""),
        ("return x * scale", "return  x*scale"),
        ("import functools\n", "import functools\n\nif functools:\n    a = 1\n    if a:\n        pass\n"),
        ("class Layer:", "class Other:\n    x = 1\n\n\nclass Layer:"),
    ],
)
def test_comments_and_layout_do_not_change_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in STOCK
    assert find(tmp_path, STOCK.replace(old, new)).digest == find(tmp_path, STOCK).digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * scale", "x * -scale"),
        ("{x!r:>{10}} {{}}", "{x!r:>{11}} {{}}"),
        ("{x!r:>{10}} {{}}", "{x!r:>{10}} {{ }}"),
        ("flag: bool = False", "flag: bool = True"),
        ("        return x * scale", "            return x * scale"),
        ("    def forward", "    @functools.cache\n    def forward"),
    ],
)
def test_code_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in STOCK
    assert find(tmp_path, STOCK.replace(old, new)).digest != find(tmp_path, STOCK).digest


def test_a_docstring_that_is_the_whole_body_is_part_of_the_digest(tmp_path: Path) -> None:
    one, two = "def f():\n    'one'\n", "def f():\n    'two'\n"
    assert find(tmp_path, one, "f").digest != find(tmp_path, two, "f").digest
    same_row = "def f(): 'doc'; return '{}'\n"
    first, second = (find(tmp_path, same_row.format(value), "f").digest for value in "ab")
    assert first != second


def test_line_is_that_of_the_code_object(packages: Packages) -> None:
    module = packages.write("decorated", "import functools\n\n@functools.cache\n@functools.lru_cache()\ndef f(): ...\n")
    (found,) = definitions(ImportedTree(), Target("decorated", "f"))
    assert found.num_decorators == 2
    assert found.line == 3 == inspect.unwrap(module.f).__code__.co_firstlineno


def test_definitions_in_every_branch_are_found(tmp_path: Path) -> None:
    source = """
    try:
        import fast
    except ImportError:
        def f(x): return x
    else:
        if fast:
            def f(x): return fast(x)
        for _ in ():
            def f(x, y): return y
    finally:
        pass
    """
    (tmp_path / "module.py").write_text(textwrap.dedent(source))
    tree = DirectoryTree(tmp_path)
    assert len(definitions(tree, Target("module", "f"))) == 3
    assert digest_of(tree, "module:f") not in {each.digest for each in definitions(tree, Target("module", "f"))}
    assert len(digest_of(tree, "module:f") or "") == 64
    assert definitions(tree, Target("module", "g")) == []
    assert definitions(tree, Target("gone", "f")) == []


def test_wheel_and_folder_agree(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text('MAJOR = 1\nMINOR = 2\nPATCH = 3\nPRE_RELEASE = "rc4"\n')
    (core / "__init__.py").write_text(STOCK)
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in core.iterdir():
            archive.write(file, file.relative_to(tmp_path))
    trees = DirectoryTree(tmp_path), DirectoryTree(wheel)
    assert [megatron_release(tree) for tree in trees] == ["1.2.3rc4", "1.2.3rc4"]
    assert len({digest_of(tree, "megatron.core:Layer") for tree in trees}) == 1
    assert megatron_release(DirectoryTree(core)) is None


@pytest.mark.parametrize("text", ["", "module", "module.f", "a:b:c", "a b:c", ":f", "module:", "m:C..f", "1m:f"])
def test_an_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form module:attr"):
        Target.parse(text)


def test_the_worst_branch_decides(packages: Packages) -> None:
    manifest = packages.manifest("scale")
    module = packages.write(
        "branches", "if 1:\n    def scale(value, factor=2): ...\nelse:\n    def scale(value): ...\n"
    )
    judgement = judge_source(manifest.model_copy(update={"target": f"{module.__name__}:scale"}), ImportedTree())
    assert judgement.verdict is Verdict.REFUSED
