#!/usr/bin/env bash
# Puts each release of tools/releases.txt, without its dependencies, into a folder of its own in the environment,
# and the packages of tools/bridge.txt, tools/launchers.txt and tools/nemo_run.txt into one each.
# Usage: make_releases.sh VENV
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."

install() {
    local folder=$1
    shift
    rm -rf "$folder"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --target "$folder" "$@" 2> >(grep -v -E "^WARNING: Location 'file:" >&2); then
        rm -rf "$folder"
        echo "$* cannot be downloaded: the tests need it; look at pip's message above" >&2
        exit 5
    fi
}

while read -r release; do
    case "$release" in "" | "#"*) continue ;; esac
    folder="$venv/releases/${release//==/-}"
    [ -f "$folder/.complete" ] && continue
    install "$folder" "$release"
    touch "$folder/.complete"
done <tools/releases.txt
# What is installed from, and the folder.
while read -r packages name; do
    folder="$venv/releases/$name"
    if ! cmp -s "$packages" "$folder/.complete"; then
        install "$folder" --requirement "$packages"
        cp "$packages" "$folder/.complete"
    fi
done <<'FOLDERS'
tools/bridge.txt megatron-bridge
tools/launchers.txt launchers
tools/nemo_run.txt nemo-run
FOLDERS
touch "$venv/.releases"
