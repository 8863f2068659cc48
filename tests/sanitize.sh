#!/usr/bin/env bash
# Runs the tests of ops on the CPU with the CPU library and _C built with clang-19's sanitizers:
#   tests/sanitize.sh address,undefined    memory errors and undefined behaviour; also in launch plans
#   tests/sanitize.sh thread               data races: between the threads of an op, and between calls at once
# A finding ends the run and is printed. Further arguments go to pytest. If the first of them is "fuzz", tests/fuzz runs instead of the
# tests, with the other arguments: tests/sanitize.sh address,undefined fuzz --calls 200000. The build, with links to the package's
# Python files, is in build/sanitize-<first sanitizer>/liger_ext.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=${1:?address,undefined or thread}
shift
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=$PWD/build/sanitize-${sanitizers%%,*}
cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" -DCMAKE_CXX_COMPILER=clang++-19 \
  -DCMAKE_C_COMPILER=clang-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLIGER_EXT_GPU=none -DLIGER_EXT_SANITIZE="$sanitizers" \
  --log-level=WARNING
cmake --build "$build"
ln -sfn "$PWD"/liger_ext/*.py "$PWD"/liger_ext/{losses,models,ops,records} "$build/liger_ext/"

files=()
for record in liger_ext/records/[a-z]*.py; do   # of each op or family
  files+=("$PWD/tests/test_$(basename "$record")")
done
for name in sanitizer threads bad_input checks gradients fused_loss_memory fused_loss_bytes count_rows; do
  files+=("$PWD/tests/test_$name.py")
done
case $sanitizers in
  address*)   # its runtime library serves UndefinedBehaviorSanitizer, too
    runtime=asan
    files+=("$PWD/tests/test_plans.py" "$PWD/tests/test_library.py::test_every_instruction_set")
    ;;
  thread) runtime=tsan ;;   # a plan has one thread, and this build one instruction set
  *) echo "no such sanitizers: $sanitizers"; exit 1 ;;
esac

# Python is not built with the sanitizer, so its library is loaded first. Reports go to files, since pytest captures output. setarch -R
# makes addresses fixed, since some kernels' random ones are outside the range that the sanitizers can map.
rm -f "$build"/report.*
report=log_path=$build/report
# A size that no machine has is an error that the library must report, not a finding.
limits=allocator_may_return_null=1:max_allocation_size_mb=4000
export ASAN_OPTIONS=detect_leaks=0:malloc_context_size=3:quarantine_size_mb=32:$limits:$report UBSAN_OPTIONS=print_stacktrace=1:$report
export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:$report
export OMP_WAIT_POLICY=passive   # torch's threads sleep while they wait: spinning, they slow some tests down (docs/measurements.md)
watched_python() {
  LD_PRELOAD="$(clang++-19 -print-file-name="libclang_rt.$runtime-$(uname -m).so") $(clang++-19 -print-file-name=libstdc++.so.6)" \
    setarch -R python3 "$@"
}
cd "$build"   # Python finds this liger_ext first
if [ $runtime = tsan ]; then   # a planted race (thread_sanitizer.cpp) must end the run with a report; else the tests below prove nothing
  if watched_python -c "import ctypes, torch; ctypes.CDLL('liger_ext/lib/libliger_ext_cpu.so').liger_ext_planted_race()" ||
    ! grep -qs "data race" report.*; then
    echo "ThreadSanitizer has not found the planted race" && exit 1
  fi
  rm report.*
fi
if [ "${1:-}" = fuzz ]; then
  PYTHONPATH=$build:$OLDPWD/tests watched_python -m "$@" || { cat report.* 2>/dev/null; exit 1; }
  exit
fi
watched_python -m pytest -k "not compile and not opcheck and not wide and not as_exact" "$@" "${files[@]}" || { cat report.* 2>/dev/null; exit 1; }
