#!/usr/bin/env bash
# Installs the system packages that the tests need and that are missing, as root or by passwordless sudo.
# Where neither is possible it prints the command to run and stops. SYSTEM_ROOT stands for / in its test.
set -euo pipefail
root=${SYSTEM_ROOT:-}
has_any() { for name in "$@"; do if command -v "$name" >/dev/null; then return 0; fi; done; return 1; }

missing=()
has_any make || missing+=(make)
has_any g++ || missing+=(g++)
# Studies are tested on PostgreSQL servers that the tests start themselves.
compgen -G "$root/usr/lib/postgresql/*/bin/initdb" >/dev/null || has_any initdb || missing+=(postgresql)
# Trials on nodes are tested on a Slurm that the tests start themselves; its scripts are checked.
compgen -G "$root/usr/sbin/slurmctld" >/dev/null || has_any slurmctld || missing+=(slurm-wlm munge)
compgen -G "$root/usr/sbin/sshd" >/dev/null || has_any sshd || missing+=(openssh-server)
# Trainings are found below a real mpirun.
has_any mpirun || missing+=(openmpi-bin)
has_any shellcheck || missing+=(shellcheck)
# The report is opened in a browser.
has_any chromium chromium-browser google-chrome-stable google-chrome || missing+=(chromium fonts-dejavu-core)
if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi

stop() {
    echo "the tests need ${missing[*]}: $1" >&2
    exit 5
}
has_any apt-get || stop "install them by this system's package manager, then run make test again"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! has_any sudo || ! sudo -n true 2>/dev/null; then
        stop "run \`sudo apt-get install --no-install-recommends ${missing[*]}\`, then make test again"
    fi
    as_root=(sudo -n)
fi
# The package shall not start a server of its own.
if [[ " ${missing[*]} " == *" postgresql "* && ! -e $root/etc/postgresql-common/createcluster.conf ]]; then
    "${as_root[@]}" mkdir -p "$root/etc/postgresql-common"
    echo "create_main_cluster = false" |
        "${as_root[@]}" tee "$root/etc/postgresql-common/createcluster.conf" >/dev/null
fi
echo "installing ${missing[*]} ..."
"${as_root[@]}" apt-get update -qq || echo "apt-get update failed; trying with the package lists that are here" >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
    stop "apt-get could not install them; look at its message above"
