"""Releases of a framework are compared by their numbers, whatever a vendor adds."""

import pytest
from packaging.version import Version

from quartet_plugin.model.releases import release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.19.2", "0.19.2"),
        ("0.18.0rc3", "0.18.0rc3"),
        ("0.18.0-vendor24", "0.18.0"),
        ("0.18.0.vendor", "0.18.0"),
        ("core_v0.18", "0"),
        ("", "0"),
    ],
)
def test_a_version_that_pep_440_does_not_know_has_the_release_of_its_numbers(
    version: str, release: str
) -> None:
    assert release_of(version) == Version(release)
