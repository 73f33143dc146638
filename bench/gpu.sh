#!/usr/bin/env bash
# Everything that is measured on a GPU, in under 8 minutes, without a network: kernels against float64 and their time,
# then a whole model's steps with and without CUDA graphs.
#
#     bench/gpu.sh [--out DIR] [--wheels DIR] [--quick] [--device cuda|cpu] [--only kernels|model]
#
# Needs Python with torch, triton, transformers and numpy; PYTHON names it (default python3). What is missing there may
# lie as wheels in the folder --wheels; nothing is installed outside --out (default: a new folder in /tmp).
# Writes kernels.json, model.json and gpu.json with the card's name and driver. Exit code: 0 = results are right,
# whatever the speed; 1 = a result is wrong or a part did not end; 2 = there is nothing to measure on.
set -u -o pipefail

python=${PYTHON:-python3}
device=cuda only= out= wheels=
quick=()
while (($#)); do
    case $1 in
        --out) out=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --device) device=$2; shift 2 ;;
        --only) only=$2; shift 2 ;;
        --quick) quick=(--quick); shift ;;
        *) echo "unknown option $1; see the top of $0" >&2; exit 2 ;;
    esac
done
cd "$(dirname "$0")/.." || exit 2
out=${out:-$(mktemp -d /tmp/graftree-gpu.XXXXXX)}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton}

if [[ -n $wheels ]]; then
    if "$python" -m pip install -q --no-index --no-deps --no-compile --target "$out/site" "$wheels"/*.whl; then
        PYTHONPATH="$out/site:$PYTHONPATH"
    else
        echo "skipped: the wheels in $wheels could not be installed"
    fi
fi

if [[ $device == cuda ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null \
        || echo "skipped: nvidia-smi does not answer"
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "skipped: torch sees no GPU"
        "$python" -m bench.gpu_summary --out "$out/gpu.json"
        exit 2
    fi
else
    export TRITON_INTERPRET=1
fi

parts=()
# part NAME SECONDS ARGUMENTS...: run bench.gpu_NAME, at most so long.
part() {
    local name=$1 seconds=$2
    shift 2
    if [[ -n $only && $only != "$name" ]]; then
        echo "skipped: $name, not asked for"
        return
    fi
    printf '\n== %s\n' "$name"
    rm -f "$out/$name.json"
    timeout -k 5 "$seconds" "$python" -m "bench.gpu_$name" --device "$device" --json "$out/$name.json" \
        ${quick[@]+"${quick[@]}"} "$@" 2>&1 | tee "$out/$name.log"
    parts+=("$name:${PIPESTATUS[0]}:$out/$name.json")
}
part model 190 --seconds 110
part kernels 270 --seconds 150

"$python" -m bench.gpu_summary --out "$out/gpu.json" ${parts[@]+"${parts[@]}"}
