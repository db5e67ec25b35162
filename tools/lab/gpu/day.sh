#!/usr/bin/env bash
# An actor on a GPU, stage by stage. From the project's root on the machine with the GPU, after unpack.sh:
#     SITE=/tmp/site OUT=$OUT bash tools/lab/gpu/day.sh STAGE ...       stages: where speed exact qwen loop
# Each process has its own limit and its own log under $OUT; one that fails leaves the others alone.
# On a CPU: DEVICE=cpu PY=.venv/bin/python MODEL=FOLDER bash tools/lab/gpu/day.sh where speed exact loop
set -u
OUT=${OUT:-build/gpu-day}; SITE=${SITE:-/tmp/site}; MODEL=${MODEL:-$SITE.model}; PY=${PY:-python3}; DEVICE=${DEVICE:-cuda}
OLD=${OLD:-} PY_SPY=${PY_SPY:-}
mkdir -p "$OUT" build; WORK=$(mktemp -d)
here=$PWD/src; path=$here; [ -d "$SITE/vllm" ] && [ "$DEVICE" = cuda ] && path=$SITE:$here
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
if [ "$DEVICE" = cuda ]; then dtype=bfloat16 few="" kv=""; else dtype=float32 few="--episodes 8 --at-once 4 --tokens 16 --repeats 1" kv="--kv-bytes 268435456"; fi
say() { echo "== $(date +%T) $*"; }
show() { grep -hE '^\{"(side|generations)|Error|error:|rror\b' "$OUT/$1.log" | grep -v '"level": "WARNING"' | tail -n "${2:-9}" | cut -c1-420; }

# turn NAME PLACE COUNT LIMIT PYTHONPATH COMMAND...: in the background; its turn ends however it ends
turn() { local name=$1 place=$2 count=$3 limit=$4 at=$5; shift 5
  ( PYTHONPATH=$at timeout "$limit" "$PY" -m "$@" --turn "$WORK" "$place" "$count" >"$OUT/$name.log" 2>&1
    echo "rc $?" >>"$OUT/$name.log"; touch "$WORK/ready-$place" "$WORK/done-$place" ) & }

where() { say where; PYTHONPATH=$path timeout 90 "$PY" - >"$OUT/where.log" 2>&1 <<'PY'
import importlib.metadata as m, torch
print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU")
for n in ("transformers", "triton", "vllm", "numba", "msgspec", "redis", "omegaconf", "nvidia-nccl-cu13", "flash-attn"):
    try: print(n, m.version(n))
    except m.PackageNotFoundError: print(n, "missing")
if torch.cuda.is_available():
    import vllm, vllm.platforms; print("platform", type(vllm.platforms.current_platform).__name__)
    import vllm._custom_ops, vllm.v1.attention.backends.flash_attn; print("kernels import")
PY
  tail -n 14 "$OUT/where.log"; }

speed() { # the engine beside vLLM alone, and beside the engine of before if OLD has its tree
  say speed; local count=3 spy="" rest="$MODEL $WORK/lengths --dtype $dtype $few $kv"; [ -n "$OLD" ] && count=4
  [ -n "$PY_SPY" ] && spy="--profile $PY_SPY $OUT/engine-profile.txt"
  turn speed-ours 0 $count 300 "$path" slipstream.tools.lab.gpu.engine_speed ours $rest $spy
  turn speed-offline 1 $count 330 "$path" slipstream.tools.lab.gpu.engine_speed offline $rest
  turn speed-vllm 2 $count 430 "$path" slipstream.tools.lab.gpu.engine_speed vllm $rest
  [ -n "$OLD" ] && turn speed-old 3 $count 530 "${path%$here}$OLD/src" slipstream.tools.lab.gpu.engine_speed ours ${rest/lengths/lengths-old}
  wait; rm -f "$WORK"/*; for name in speed-ours speed-offline speed-vllm speed-old; do [ -f "$OUT/$name.log" ] && show $name; done
  tar -cz -C "$HOME/.cache" -f "$OUT/vllm-cache.tgz" vllm 2>/dev/null; ls -la "$OUT/vllm-cache.tgz" 2>/dev/null; }

exact() { # every token's version, by recomputing its log-probability
  say exact; local small=""; [ "$DEVICE" = cuda ] || small="--commits 3 --at-once 4 --tokens 48"
  turn exact-keep 0 2 200 "$path" slipstream.tools.lab.gpu.engine_exact "$MODEL" --dtype $dtype $small $kv
  turn exact-recompute 1 2 220 "$path" slipstream.tools.lab.gpu.engine_exact "$MODEL" --dtype $dtype --kv-policy recompute $small $kv
  wait; rm -f "$WORK"/*; show exact-keep 3; show exact-recompute 3; }

qwen() { # the shapes of Qwen3-0.6B and 1.7B, with random weights
  for size in "0.6B 1024 3072" "1.7B 2048 6144"; do set -- $size
    mkdir -p "$WORK/q"; PYTHONPATH=$path "$PY" - "$WORK/q/Qwen3-$1" "$2" "$3" "$MODEL" <<'PY'
import shutil, sys
from pathlib import Path
from transformers import Qwen3Config
folder, hidden, intermediate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"],
            dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}).save_pretrained(folder)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"): shutil.copy(Path(sys.argv[4]) / name, folder)
PY
    say "Qwen3-$1"
    turn "qwen-$1-ours" 0 2 230 "$path" slipstream.tools.lab.gpu.engine_speed ours "$WORK/q/Qwen3-$1" "$WORK/l" --kv-bytes 12884901888 --repeats 1
    turn "qwen-$1-vllm" 1 2 260 "$path" slipstream.tools.lab.gpu.engine_speed vllm "$WORK/q/Qwen3-$1" "$WORK/l" --kv-bytes 12884901888 --repeats 1
    wait; rm -rf "$WORK"/*; show "qwen-$1-ours"; show "qwen-$1-vllm"
  done; }

loop() { # learner and one actor on one GPU, a real language model, questions in natural language
  say loop; PYTHONPATH=$path "$PY" -m slipstream.tools.lab.gpu.sums build/sums.jsonl; rm -rf "$WORK/runs"
  local cpu=""; [ "$DEVICE" = cuda ] || cpu="model.dtype=float32 actors.devices=[] actors.kv_cache_bytes=67108864 actors.max_episodes=16 replay.groups_per_step=2 learner.steps=3 eval.num_tasks=8"
  PYTHONPATH=$path timeout "${LOOP_S:-250}" "$PY" -c "import sys; from slipstream.tools.cli.start import main; sys.exit(main())" up conf/sums_smollm2_1x80gb.yaml \
    model.path="$MODEL" run.name=loop run.root="$WORK/runs" $cpu ${LOOP_SET:-} >"$OUT/loop.log" 2>&1; echo "rc $?" >>"$OUT/loop.log"
  for l in learner actor-0 publisher; do tail -n 60 "$WORK/runs/loop/logs/$l.log" >"$OUT/loop-$l.log" 2>/dev/null; done
  cat "$OUT"/loop-*.log | grep -E '"level": "(ERROR|WARNING)"' | tail -n 6 | cut -c1-300
  cp "$WORK/runs/loop/metrics.jsonl" "$OUT/loop-metrics.jsonl" 2>/dev/null; cp "$WORK/runs/loop/summary.json" "$OUT/loop-summary.json" 2>/dev/null
  tail -n "${LOOP_LINES:-14}" "$OUT/loop.log" | cut -c1-200; }

for stage in "$@"; do $stage; done; say end
