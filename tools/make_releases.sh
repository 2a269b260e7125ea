#!/usr/bin/env bash
# Puts each release of tools/releases.txt, without its dependencies, into a folder of its own in the environment.
# Usage: make_releases.sh VENV
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."
while read -r release; do
    case "$release" in "" | "#"*) continue ;; esac
    folder="$venv/releases/${release//==/-}"
    [ -f "$folder/.complete" ] && continue
    rm -rf "$folder"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --target "$folder" "$release" 2> >(grep -v -E "^WARNING: Location 'file:" >&2); then
        rm -rf "$folder"
        echo "$release cannot be downloaded: the contract tests need it; look at pip's message above" >&2
        exit 5
    fi
    touch "$folder/.complete"
done <tools/releases.txt
touch "$venv/.releases"
