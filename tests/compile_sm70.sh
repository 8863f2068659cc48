#!/usr/bin/env bash
# Compiles every .cu for V100 (sm_70), down to machine code, device side only. CUDA 13 has no Volta: clang-19 compiles and the
# assembler of CUDA 12.4, from its PyPI packages, assembles. A V100 user builds with CUDA 12's nvcc; this shows that nothing
# here needs more than Volta has.
#   tests/compile_sm70.sh           pip comes from the PATH: that of .venv, if it is there
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=build/compile-sm70   # relative, so that checkouts can share a compiler cache
packages=(nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-cccl-cu12==12.8.90)

# A toolkit as clang expects one: include, bin, nvvm in one folder.
if [ ! -e "$build/toolkit/ready" ]; then
  rm -rf "$build"
  mkdir -p "$build/toolkit/bin"
  python3 -m pip install --quiet --no-deps --target "$build/packages" "${packages[@]}"
  cp -r "$build"/packages/nvidia/cuda_*/include "$build/toolkit/"
  cp -r "$build/packages/nvidia/cuda_nvcc/nvvm" "$build/toolkit/"
  install -m 755 "$build/packages/nvidia/cuda_nvcc/bin/ptxas" "$build/toolkit/bin/"
  touch "$build/toolkit/include/curand_mtgp32_kernel.h" "$build/toolkit/ready"   # clang includes it; nothing here uses it
fi

compile() {
  $cache clang++-19 -x cuda --cuda-gpu-arch=sm_70 --cuda-device-only --cuda-path="$1/toolkit" -include tests/clang_cuda.h \
    -Wno-unknown-cuda-version -Wno-unknown-attributes -O3 -std=c++20 -DLIGER_BACKEND=gpu -Icsrc -c "$2" -o "$1/$(basename "$2" .cu).cubin"
}
export -f compile
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_EXTRAFILES=$build/toolkit/bin/ptxas cache
cache=$(command -v ccache || true)
printf '%s\n' csrc/gpu/*.cu | xargs -P "$(nproc)" -I{} bash -c 'compile "$0" {}' "$build"
echo "$(ls "$build"/*.cubin | wc -l) of $(ls csrc/gpu/*.cu | wc -l) files compiled for sm_70, $SECONDS s"
