# The image of each pin: `make images`. `graft pins context` writes what each is built from; its Dockerfile names the
# base by digest. A test compares the targets with pins.yaml.

variable "CONTEXT" {
  default = "build/images"
}

variable "REPOSITORY" {
  default = "graft-vllm"
}

# The project's version, which ends the tags.
variable "VERSION" {
  default = "dev"
}

variable "REVISION" {
  default = ""
}

variable "SOURCE" {
  default = ""
}

# Time of everything that a layer holds: equal inputs, equal layers.
variable "SOURCE_DATE_EPOCH" {
  default = "0"
}

# Not empty: with attestations, which Docker's own builder cannot make; a builder of the kind docker-container can.
variable "RELEASE" {
  default = ""
}

# An image with vLLM for CPUs that keeps the contract of vllm/vllm-openai; none is published.
variable "CPU_BASE" {
  default = ""
}

function "labels" {
  params = [vllm]
  result = {
    "org.opencontainers.image.title" = "vLLM ${vllm} with Graft's fixes"
    "org.opencontainers.image.version" = "${VERSION}-vllm${vllm}"
    "org.opencontainers.image.revision" = REVISION
    "org.opencontainers.image.source" = SOURCE
    "org.opencontainers.image.licenses" = "Apache-2.0"
    "org.opencontainers.image.base.name" = "docker.io/vllm/vllm-openai:v${vllm}"
  }
}

group "default" {
  targets = ["vllm-0_33_0", "vllm-0_32_0"]
}

target "_common" {
  args = {
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  attest = RELEASE == "" ? [] : ["type=provenance,mode=max", "type=sbom"]
}

target "vllm-0_33_0" {
  inherits = ["_common"]
  context  = "${CONTEXT}/0.33.0"
  labels   = labels("0.33.0")
  tags = [
    "${REPOSITORY}:${VERSION}-vllm0.33.0",
    "${REPOSITORY}:vllm0.33.0",
    "${REPOSITORY}:latest",
  ]
}

target "vllm-0_32_0" {
  inherits = ["_common"]
  context  = "${CONTEXT}/0.32.0"
  labels   = labels("0.32.0")
  tags = [
    "${REPOSITORY}:${VERSION}-vllm0.32.0",
    "${REPOSITORY}:vllm0.32.0",
  ]
}

target "cpu" {
  inherits = ["_common"]
  context  = "${CONTEXT}/0.32.0"
  args = {
    BASE = CPU_BASE
  }
  labels = merge(labels("0.32.0"), { "org.opencontainers.image.base.name" = CPU_BASE })
  tags   = ["${REPOSITORY}:${VERSION}-cpu"]
}
