#!/usr/bin/env bash
# Builds the image without a Docker engine and trains with it over two nodes of two processes each, which are two network
# namespaces of this machine, joined by a virtual cable. As root, from the project's folder:
#
#   apt-get install buildah debootstrap iproute2
#   docker/two_nodes.sh                                # the demo
#   docker/two_nodes.sh model=revnet34 data=synthetic  # or what else
#   MODULE=launch.doctor docker/two_nodes.sh
#
# BUILD_FLAGS are further arguments of both builds, like --volume /etc/pip.conf:/etc/pip.conf:ro.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra build_flags <<< "${BUILD_FLAGS:-}"
module=${MODULE:-launch.train}
[ $# -gt 0 ] || set -- experiment=demo

# A base as small as can be: Debian's Python and a CPU build of PyTorch.
if ! buildah inspect --type image localhost/petra-base > /dev/null 2>&1; then
    root=$(mktemp -d)
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$root"
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$root" /
    rm -rf "$root"
    buildah run --isolation chroot "${build_flags[@]}" "$base" -- \
        python3 -m pip install --break-system-packages --no-cache-dir "${TORCH:-torch==2.13.0}"
    buildah commit --quiet --rm "$base" localhost/petra-base
fi
buildah build --isolation chroot --layers "${build_flags[@]}" \
    --build-arg BASE=localhost/petra-base --file docker/Dockerfile --tag localhost/petra .

runs=$(mktemp -d) # both nodes' /workspace/runs, for the image's user
chmod 777 "$runs"
containers=()
clean() {
    for node in 0 1; do ip netns delete "petra$node" 2> /dev/null || true; done
    for container in "${containers[@]}"; do buildah rm "$container" > /dev/null; done
    rm -rf "$runs"
}
trap clean EXIT

ip netns add petra0
ip netns add petra1
ip link add eth0 netns petra0 type veth peer name eth0 netns petra1
for node in 0 1; do
    ip -n "petra$node" address add "10.99.0.$((node + 1))/24" dev eth0
    ip -n "petra$node" link set lo up
    ip -n "petra$node" link set eth0 up
done

# What `docker run` would start: the image's entrypoint, with these variables and arguments.
mapfile -t entrypoint < <(buildah inspect --type image --format '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}' localhost/petra |
    sed '/^$/d')
for node in 0 1; do
    container=$(buildah from localhost/petra)
    containers+=("$container")
    ip netns exec "petra$node" buildah run --isolation chroot --volume "$runs:/workspace/runs" \
        --env NNODES=2 --env NODE_RANK="$node" --env NPROC_PER_NODE=2 --env MASTER_ADDR=10.99.0.1 --env GLOO_SOCKET_IFNAME=eth0 \
        "$container" -- "${entrypoint[@]}" --module "$module" "$@" 2>&1 | sed -u "s/^/node$node: /" &
done
wait -n
wait -n
