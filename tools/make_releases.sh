#!/usr/bin/env bash
# Puts each release of tools/releases.txt, without its dependencies, into a folder of its own in the environment,
# and the packages of tools/bridge.txt into one.
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
folder="$venv/releases/megatron-bridge"
if ! cmp -s tools/bridge.txt "$folder/.complete"; then
    install "$folder" --requirement tools/bridge.txt
    cp tools/bridge.txt "$folder/.complete"
fi
touch "$venv/.releases"
