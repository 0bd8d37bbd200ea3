# The image contains both binaries, statically linked. The daemon runs from it, and copies the plugin to the node.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY plugin plugin
COPY daemon daemon
ARG VERSION=dev
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.gitVersion=${VERSION}" -o /out/sluice ./plugin && \
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.gitVersion=${VERSION}" -o /out/sluiced ./daemon

# The daemon installs the rules of pods that were added while it was down. It must use the iptables variant that the
# plugin used on the node. Debian's package contains both variants, legacy and nft, and the tests run with it.
# The public roots go into the bundle for containers that have none.
FROM debian:12-slim
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates iptables && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /out/sluice /out/sluiced /usr/local/bin/
COPY LICENSE NOTICE /usr/share/doc/sluice/
ENTRYPOINT ["sluiced"]
CMD ["run"]
