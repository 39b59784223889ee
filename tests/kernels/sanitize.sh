#!/usr/bin/env bash
# The kernels under sanitizers, on every instruction set this processor has, and on AMX with tiles emulated in memory
# (amx/tiles.h) where it has AVX-512:
#   address and undefined behaviour: the kernels' own tests, the simulator's and the draws' against an extension built
#   with both;
#   tensors are then heap blocks between guarded zones, so that a read or write outside one ends the run;
#   threads: a C++ driver (races.cpp), because Python and torch report races of their own.
# Arguments: address, threads (both where none is given). CXX and PYTHON choose the compiler and the interpreter;
# KERNELS_SANITIZE_JOBS the number of compilers at a time.
set -euo pipefail
cd "$(dirname "$0")/../.."

python="${PYTHON:-python}"
cxx="${CXX:-g++}"
jobs="${KERNELS_SANITIZE_JOBS:-2}"
emulated_tiles=-DKERNELS_EMULATED_TILES
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

step() { printf -- '-- %s (%d s)\n' "$1" "$SECONDS"; }

# compile FOLDER FLAGS... < sources: an object a source into FOLDER, $jobs at a time
compile() {
    local folder="$1"
    shift
    mkdir -p "$folder"
    xargs -P "$jobs" -I '{}' bash -c '
        source="$1" folder="$2"
        shift 2
        "$@" -c "$source" -o "$folder/$(echo "${source%.cpp}" | tr / _).o"' _ '{}' "$folder" \
        "$cxx" -std=c++17 -O1 -g1 -fno-omit-frame-pointer -fPIC "$@"
}

address() {
    local flags=(-fsanitize=address,undefined -fno-sanitize-recover=all "$emulated_tiles")
    step "building the extension with ${flags[*]}"
    local includes suffix
    includes="$("$python" -m pybind11 --includes)"
    suffix="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
    mkdir -p "$scratch/kernels" "$scratch/tests/kernels"
    cp kernels/*.py "$scratch/kernels/"
    # shellcheck disable=SC2086
    find kernels/csrc -name '*.cpp' | compile "$scratch/asan" "${flags[@]}" -fvisibility=hidden $includes
    "$cxx" -shared "${flags[@]}" "$scratch"/asan/*.o -ldl -o "$scratch/kernels/_native$suffix"

    # Not the tests of the package's name (they start interpreters of their own), those that compile programs of their
    # own, those of forks, those of times (they mean nothing here), and the one of the processor's own paths.
    cp tests/kernels/*.py "$scratch/tests/kernels/"
    rm -f "$scratch"/tests/kernels/test_kernels_package.py
    step "running the kernels' tests with it"
    tests_in "$scratch" tests/kernels \
        -k "not gil and not threshold and not rate and not cpu_time and not fork and not what_a_share_throws \
            and not every_path"

    step "running the simulator's tests with it, and those of draws"
    mkdir "$scratch/simulator"
    ln -s "$PWD"/{harness,strategies,conf,paper_figures,tests} "$scratch/kernels" "$scratch/simulator/"
    tests_in "$scratch/simulator" tests/unit/routing/test_draws.py \
        tests/unit/machine/test_{simulated,simulated_reference,contention,launching,tapes}.py
}

# tests_in FOLDER PYTEST_ARGUMENTS...: with the sanitizers' libraries loaded
tests_in() (
    cd "$1"
    shift
    export LD_PRELOAD ASAN_OPTIONS UBSAN_OPTIONS OMP_NUM_THREADS=1
    LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libubsan.so)"
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --no-header --capture=sys "$@"
)

threads() {
    step "building races.cpp with -fsanitize=thread"
    { find kernels/csrc -name '*.cpp' -not -path '*/bindings/*' -not -name module.cpp \
          -not -path '*/simulation/*'  # runs on one thread
      echo tests/kernels/races.cpp; } | compile "$scratch/tsan" -fsanitize=thread "$emulated_tiles" -Ikernels/csrc
    "$cxx" -fsanitize=thread "$scratch"/tsan/*.o -ldl -o "$scratch/races"
    # Fixed addresses where the system allows it: older runtimes refuse the widest randomisation.
    local fixed=(setarch "$(uname -m)" -R)
    "${fixed[@]}" true 2>/dev/null || fixed=()
    for isa in portable avx2 avx512 avx512bf16 amx; do
        step "races on $isa"
        local status=0
        TSAN_OPTIONS=halt_on_error=1 "${fixed[@]}" "$scratch/races" "$isa" || status=$?
        case "$status" in
            0) ;;
            77) skipped+=("races on $isa") ;;  # the processor lacks it
            *) return "$status" ;;
        esac
    done
}

skipped=()
[[ $# -gt 0 ]] || set -- address threads
for part in "$@"; do "$part"; done
for part in "${skipped[@]}"; do step "SKIPPED: $part"; done
step "no sanitizer complained"
