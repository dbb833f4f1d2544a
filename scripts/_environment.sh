# Sourced by scripts/demo and scripts/test: the virtual environment that both use, .venv in the repository.
# Needs only bash and a Python 3.10 or newer: python3, or what PYTHON names.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
environment=$repository/.venv
# Three lines: what is installed (runtime, dev, or unfinished), from which sources of a build, and where.
stamp=$environment/.stepscope
python=${PYTHON:-python3}

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

# prepare_environment runtime|dev: have .venv ready, installing only what is missing or out of date.
prepare_environment() {
    local wanted=$1 have="" from="" place="" current
    current=$(cd "$repository" && cat pyproject.toml hatch_build.py native/* | cksum)
    if [ -f "$stamp" ]; then
        { read -r have && read -r from && read -r place; } <"$stamp" || have=unfinished
    fi
    [ "$have" = dev ] && wanted=dev
    if [ "$have" = unfinished ] || [ "${place:-$environment}" != "$environment" ] || ! environment_runs; then
        make_environment
    elif [ "$have" = "$wanted" ] && [ "$from" = "$current" ]; then
        return
    fi
    install_package "$wanted"
    printf '%s\n%s\n%s\n' "$wanted" "$current" "$environment" >"$stamp"
}

environment_runs() {
    "$environment/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

make_environment() {
    require_python
    rm -rf "$environment"
    mkdir "$environment"
    echo unfinished >"$stamp"
    "$python" -m venv "$environment" >/dev/null ||
        fail "$python could not make a virtual environment: install its module venv" \
            "(on Debian and Ubuntu: apt-get install python3-venv)."
}

# require_python: end with one sentence unless there is a Python that can make virtual environments.
require_python() {
    local version advice="install Python 3.10 or newer (on Debian and Ubuntu: apt-get install python3 python3-venv)"
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
        fail "stepscope needs Python, and $python could not be run: $advice."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "stepscope needs Python 3.10 or newer, and $python is $version: $advice, or name another with PYTHON=..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments, as its module venv or ensurepip is missing:" \
            "install it (on Debian and Ubuntu: apt-get install python3-venv)."
}

# install_package runtime|dev: what pip says is shown only when it fails. Most modules are never imported, and compiling
# all of them takes a minute.
install_package() {
    local requirement=$repository what="stepscope" log=$environment/install.log
    if [ "$1" = dev ]; then
        requirement="$repository[dev]"
        what="stepscope, its development tools and PyTorch"
    fi
    printf 'Installing %s into .venv; later runs reuse it.\n' "$what" >&2
    echo unfinished >"$stamp"
    if ! "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
        --editable "$requirement" >"$log" 2>&1; then
        cat "$log" >&2
        fail "pip could not install $what into .venv; what it said stands above."
    fi
}

# prepare_jax_environment: set STEPSCOPE_JAX_PYTHON to a Python with JAX and xprof, from .venv-jax, which is installed
# where it is missing or out of date. Without a registry the tests of JAX are skipped; the others do not need it.
prepare_jax_environment() {
    local place=$repository/.venv-jax log stamp current
    if [ -n "${STEPSCOPE_JAX_PYTHON:-}" ]; then
        return
    fi
    log=$place/install.log
    stamp=$place/.stepscope
    current="$(cksum <"$repository/pyproject.toml") $place"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$current" ] || ! "$place/bin/python" -c 'import pip' 2>/dev/null; then
        echo "Installing JAX and xprof into .venv-jax; later runs reuse it." >&2
        rm -rf "$place"
        # An old pip (23.0, of Python 3.10) searches the many requirements of xprof for more than ten minutes.
        if ! { "$environment/bin/python" -m venv "$place" &&
            "$place/bin/python" -m pip install --quiet --no-input --retries 1 --upgrade pip &&
            "$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --retries 1 --no-compile \
                --editable "$repository[jax-tests]"; } >"$repository/.venv-jax.log" 2>&1; then
            echo "JAX could not be installed, so its tests are skipped; $repository/.venv-jax.log says why." >&2
            return
        fi
        mv "$repository/.venv-jax.log" "$log"
        printf '%s\n' "$current" >"$stamp"
    fi
    export STEPSCOPE_JAX_PYTHON=$place/bin/python
}
