#!/usr/bin/env bash
# Compiles every .cu for MI355X (gfx950) into build/compile-gfx950/*.co, device side only. Debian's clang-19 does not support gfx950
# well enough; ROCm 7's clang does. In its place, this script uses clang 22 of the PyPI package ziglang, with Debian's device libraries.
#   tests/compile_gfx950.sh           pip comes from .venv, if it exists, else from the PATH
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
export build=build/compile-gfx950   # relative, so that checkouts can share a compiler cache
packages=ziglang==0.17.0
rm -f "$build/done" "$build"/*.co
if [ ! -x "$build/bin/clang" ]; then
  rm -rf "$build"
  mkdir -p "$build/bin" "$build/bitcode"
  python3 -m pip install --quiet --no-deps --target "$build/packages" $packages
  # clang calls `lld -flavor gnu ...`.
  printf '#!/bin/sh\nshift 2\nexec %s/packages/ziglang/zig ld.lld "$@"\n' "$PWD/$build" > "$build/bin/lld"
  ln -s /usr/lib/*/amdgcn/bitcode/*.bc "$build/bitcode/"
  # The nearest relative's file differs in nothing that these kernels use (cmake/Hip.cmake does the same).
  ln -sf "$(readlink -f "$build/bitcode/oclc_isa_version_1036.bc")" "$build/bitcode/oclc_isa_version_950.bc"
  # ccache takes a compiler of this name for clang.
  printf '#!/bin/sh\nexec %s/packages/ziglang/zig clang "$@"\n' "$PWD/$build" > "$build/bin/clang"
  chmod +x "$build/bin/lld" "$build/bin/clang"
fi

# Code object 6 requires newer device libraries than Debian's. Debian's HIP headers require a macro, and clang 22 requires two of the device
# libraries as arguments.
compile() {
  PATH=$PWD/$build/bin:$PATH $cache clang -x hip --offload-arch=gfx950 --cuda-device-only --no-gpu-bundle-output \
    -mcode-object-version=5 -O3 -std=c++20 -fvisibility=hidden -D__AMDGCN_WAVEFRONT_SIZE=64 -DLIGER_BACKEND=gpu -Icsrc \
    --rocm-path=/usr --rocm-device-lib-path="$build/bitcode" -resource-dir "$(clang++-19 -print-resource-dir)" \
    -Xclang -mlink-builtin-bitcode -Xclang "$build/bitcode/hip.bc" \
    -Xclang -mlink-builtin-bitcode -Xclang "$build/bitcode/oclc_daz_opt_off.bc" -c "$1" -o "$build/$(basename "$1" .cu).co"
}
export -f compile
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK="string:$packages" CCACHE_EXTRAFILES=$build/bitcode/ocml.bc cache
cache=$(command -v ccache || true)
printf '%s\n' csrc/gpu/*.cu | xargs -P "$(nproc)" -I{} bash -c 'compile {}'
touch "$build/done"   # pytest reads the code objects of a complete run
echo "$(ls "$build"/*.co | wc -l) of $(ls csrc/gpu/*.cu | wc -l) files compiled for gfx950, $SECONDS s"
