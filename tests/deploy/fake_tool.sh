#!/bin/sh
# Stands for gcloud, kubectl, terraform, docker, curl, kvfleet and build_images: writes down how it was called (arguments
# end in 0x1f, calls in 0x1e), fails where $FAIL_ON says so, and answers as much as the scripts need.
name=${0##*/}
{ printf '%s\037' "$name" "$@"; printf '\036'; } >>"$RECORD"
call="$name $*"
case $FAIL_ON in ?*) case $call in *"$FAIL_ON"*) echo "$name says no" >&2; exit 7 ;; esac ;; esac
for last; do :; done

case $call in
  "kubectl kustomize "*) if [ -n "$KUSTOMIZE" ]; then exec "$KUSTOMIZE" build "$last"; else cat "$FAKES/fleet.yaml"; fi ;;
  *" --dry-run=client "*) if [ -n "$REAL_KUBECTL" ]; then exec "$REAL_KUBECTL" "$@"; else echo "made by: $call"; fi ;;
  *" apply "*" -f -") { cat; echo "---"; } >>"$RECORD.applied" ;;
  *" get-credentials "*) if [ -e "$FAKES/kubeconfig" ]; then cp "$FAKES/kubeconfig" "$KUBECONFIG"; fi ;;
  *" get service ingress "*) printf 203.0.113.10 ;;
  "terraform "*" output -raw registry") printf eu/x ;;
  "terraform "*" output -raw ingress_address") printf 203.0.113.10 ;;
  "terraform "*" output -raw gpu_type") printf nvidia-l4 ;;
  "terraform "*" output -raw private_endpoint") printf '%s' "${PRIVATE_ENDPOINT:-false}" ;;
  "gcloud projects describe "*) echo my-project ;;
  *" print-access-token") echo TOKEN-OF-GCLOUD ;;
  "gcloud "*" describe "*) [ -n "$EXISTS" ] ;;
  "kvfleet secrets --out "*) mkdir -p "$3" && cp -Rn "$FAKES/secrets/." "$3/" ;;
  curl*)
    cat >>"$RECORD.stdin"
    case $call in */generate*) printf 'data: {"type":"%s"}\n\n' "${LAST_EVENT:-done}" ;; esac
    ;;
esac
