#!/usr/bin/env bash
# Installs the core alone into a new environment, with no framework, and lets it answer: what it downloads, how long
# each answer takes. Fails over 200 MB, or where a command fails.
# Usage: bash tools/core_install.sh PYTHON
set -euo pipefail
python=$1
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" wheel -q --disable-pip-version-check --wheel-dir "$folder/wheels" "$repository"
megabytes=$(du -sm "$folder/wheels" | cut -f1)
echo "downloads: $(ls "$folder/wheels" | wc -l) packages, $megabytes MB"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-index --find-links "$folder/wheels" \
    "$folder"/wheels/quartet_plugin-*.whl
cd "$folder"
cat > rows.json <<'ROWS'
[{"gpu": "H100", "gpus": 64, "gbs": 128, "tp": 2, "pp": 4, "layers": 32, "hidden": 4096, "heads": 32, "seq_len": 4096}]
ROWS
cat > costs.json <<'COSTS'
{"schema_version": 1, "num_devices": 2, "num_microbatches": 4, "layers": [
 {"name": "layer.0", "forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "activation_bytes": 1.0},
 {"name": "layer.1", "forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "activation_bytes": 1.0}]}
COSTS
answer() {
    local TIMEFORMAT="quartet $1 $2: %1R s, %1U s of processor time"
    time "$folder/venv/bin/quartet" "$@" > answer.txt
    head -1 answer.txt
}
answer layout --model llama3-8b --pp 8 --vpp 2 --tp 2
answer plan --model llama3-8b --cluster H100 --devices 64 --global-batch 512 --named-only
answer predict rows.json -o predictions.json
answer schedule search costs.json -o schedule.json --evaluations 100
[ "$megabytes" -le 200 ]
