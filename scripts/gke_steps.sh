# Shared by deploy_gke and quickstart_gke (sourced, not run): how a step is carried out or, with --dry-run, printed.
# shellcheck shell=bash
#
# Nothing here may print or pass on a command line what a secret file holds: only the files' names.

dry_run=false
steps=0

say() { echo "${0##*/}: $*" >&2; }
die() { say "$@"; exit 1; }

step() { # a heading, so that a failure below it is found
  steps=$((steps + 1))
  if $dry_run; then echo "# $steps. $*"; else say "$steps. $*"; fi
}

quote() { # the command as one could type it
  local word line=
  for word in "$@"; do
    case $word in
      *[!A-Za-z0-9_@%+=:,./-]* | '') line+=" '${word//\'/\'\\\'\'}'" ;;
      *) line+=" $word" ;;
    esac
  done
  echo "${line# }"
}

run() {
  if $dry_run; then quote "$@"; else "$@"; fi
}

# apply_made kubectl create ...: makes the object, or brings it up to date. Applied by the server: `kubectl apply` alone
# would keep a copy of a Secret in an annotation.
apply_made() {
  local make=("$@" --dry-run=client -o yaml)
  local apply=("${kube[@]}" apply --server-side --force-conflicts --field-manager=kvfleet-deploy -f -)
  if $dry_run; then
    echo "$(quote "${make[@]}") | $(quote "${apply[@]}")"
  else
    local made
    made=$("${make[@]}") # by itself, so that nothing is applied when it fails
    "${apply[@]}" <<<"$made"
  fi
}

# write FILE: standard input into a file of ours, shown in a dry run.
write() {
  if $dry_run; then
    echo "cat >$(quote "$1") <<'END'"
    cat
    echo END
  else
    cat >"$1"
  fi
}

need_tools() { # all that is missing, at once
  $dry_run && return
  local tool missing=()
  for tool in "$@"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ ${#missing[@]} -eq 0 ] || die "not on PATH: ${missing[*]} (see docs/gke.md)"
}

need_value() { # need_value FLAG "$@": a flag's value, which must be there and not be the next flag
  if [ $# -lt 3 ] || [ -z "$3" ] || [ "${3#--}" != "$3" ]; then die "$1 wants a value (--help)"; fi
}
