"""No file of the repository names the host of a package index: who installs Atoll may reach another one."""

from __future__ import annotations

from tests.architecture.pages import read_files

# In parts, so that these lines do not find themselves.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
    )
]


def test_no_file_names_the_host_of_a_package_index() -> None:
    found = {name: hosts for name, text in read_files().items() if (hosts := [one for one in HOSTS if one in text])}
    assert found == {}
