"""Writes what the plugin knows of a release of Megatron: its functions' parameters and hashes, and its patch.

    python tools/learn_release.py WHEEL_OR_TREE [--name NAME] [--custom-schedules]

WHEEL_OR_TREE is a wheel of megatron-core, or a folder with the package `megatron`. NAME is the release that
its source states where none is given. Writes quartet_plugin/megatron/seams/NAME.json and
patches/megatron-core-NAME.patch. `--custom-schedules` says that custom schedules have trained with the
release: without it its sources are known for measuring alone. Nothing of the release is imported or run.
"""

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quartet_plugin.megatron.seams import FOLDER, release_of  # noqa: E402 - from this checkout
from quartet_plugin.megatron.seams.declared import ALL  # noqa: E402
from quartet_plugin.megatron.vendored import PARSE_ARGS, patch_of  # noqa: E402
from quartet_plugin.rank.source_tree import SourceTree  # noqa: E402


def learn(root: Path, *, custom_schedules: bool) -> dict[str, object]:
    """The content of a release's file. Raises SystemExit where `root` has no Megatron."""
    if not (root / "megatron" / "core" / "package_info.py").is_file():
        raise SystemExit(
            f"{root}: has no megatron/core/package_info.py; give a wheel or the folder of megatron/"
        )
    tree = SourceTree((root,))
    functions = {}
    for seam in sorted(ALL, key=lambda seam: seam.path):
        function = tree.function(seam.module, seam.name)
        functions[seam.path] = (
            None if function is None else {"parameters": function.parameters, "source": function.source}
        )
    return {
        "schema_version": 1,
        "release": release_of(root),
        "custom_schedules": custom_schedules,
        "functions": functions,
    }


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", type=Path, metavar="WHEEL_OR_TREE")
    parser.add_argument("--name")
    parser.add_argument("--custom-schedules", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.release
        if root.suffix == ".whl":
            with zipfile.ZipFile(root) as wheel:
                wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("megatron/")])
            root = Path(folder)
        content = learn(root, custom_schedules=options.custom_schedules)
        name = options.name or str(content["release"])
        target = FOLDER / f"{name}.json"
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        patch = ROOT / "patches" / f"megatron-core-{name}.patch"
        patch.write_text(patch_of(SourceTree((root,))), encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: {len(ALL)} functions; {patch.relative_to(ROOT)}: {PARSE_ARGS[1]}")


if __name__ == "__main__":
    main()
