#!/usr/bin/env bash
# Builds the GPU library alone, on a machine that needs no GPU, in build/compile-<vendor>:
#   tests/compile_gpu.sh hip                      with clang-19 and AMD's device libraries, for every supported architecture
#   tests/compile_gpu.sh cuda "8.0;10.0;12.0"     with nvcc, for these architectures
# cmake, ninja and a python3 with torch come from .venv, if it exists, else from the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
vendor=${1:?hip or cuda}
VENDOR=${vendor^^}
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=$PWD/build/compile-$vendor
cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" -DLIGER_EXT_GPU="$vendor" \
  -U LIGER_EXT_${VENDOR}_ARCHS ${2:+-DLIGER_EXT_${VENDOR}_ARCHS="$2"} -DLIGER_EXT_OUTPUT="$build/lib" --log-level=WARNING
cmake --build "$build" --target "liger_ext_$vendor"
archs=$(sed -n "s/^LIGER_EXT_${VENDOR}_ARCHS:[A-Z]*=//p" "$build/CMakeCache.txt")
echo "built for $vendor, ${archs:-every architecture}: $(du -h "$build/lib/libliger_ext_$vendor.so" | cut -f1), $SECONDS s"
