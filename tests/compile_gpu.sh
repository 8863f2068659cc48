#!/usr/bin/env bash
# Builds the GPU library alone, on a machine that needs no GPU, in a build folder of its own:
#   tests/compile_gpu.sh hip "gfx942;gfx1100"     with clang-19 and AMD's device libraries
#   tests/compile_gpu.sh cuda "7.5;9.0a"          with nvcc
# cmake, ninja and a python3 with torch come from the PATH: those of .venv, if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
vendor=${1:?hip or cuda}
archs=${2:?architectures}
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=$PWD/build/compile-$vendor
cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" -DLIGER_EXT_GPU="$vendor" \
  -DLIGER_EXT_CUDA_ARCHS="$archs" -DLIGER_EXT_HIP_ARCHS="$archs" -DLIGER_EXT_OUTPUT="$build/lib" --log-level=WARNING
cmake --build "$build" --target liger_ext_gpu
echo "built for $vendor, $archs: $(du -h "$build/lib/libliger_ext_gpu.so" | cut -f1)"
