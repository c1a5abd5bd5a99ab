# What may differ between two fleets. Without a default: must be given.

variable "project_id" {
  description = "The Google Cloud project that everything is made in. It must exist and have billing."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id is the project's id (6 to 30 of a-z, 0-9 and -), not its name or number."
  }
}

variable "name" {
  description = "Name of the cluster, and prefix of what belongs to it: two fleets in one project need two names."
  type        = string
  default     = "kvfleet"

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.name))
    error_message = "name is 1 to 20 of a-z, 0-9 and -, starts with a letter and does not end with -."
  }
}

variable "region" {
  description = "Region of the cluster, the registry and the keys. The control plane runs in three of its zones."
  type        = string
  default     = "us-central1"

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region is a region such as us-central1, not a zone."
  }
}

variable "authorized_networks" {
  description = "Who may reach the control plane: name to CIDR, for example { office = \"203.0.113.0/24\" }."
  type        = map(string)

  validation {
    condition     = length(var.authorized_networks) > 0
    error_message = "authorized_networks needs at least one entry: nobody could reach the control plane."
  }

  validation {
    condition     = alltrue([for cidr in values(var.authorized_networks) : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "Every authorized network is a CIDR such as 203.0.113.7/32, and none is the whole internet."
  }
}

variable "private_endpoint" {
  description = "True: the control plane has no public address, and kubectl works from inside the VPC only (VPN, bastion)."
  type        = bool
  default     = false
}

variable "release_channel" {
  description = "How early Kubernetes versions come."
  type        = string
  default     = "REGULAR"

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE"], var.release_channel)
    error_message = "release_channel is RAPID, REGULAR or STABLE."
  }
}

variable "deletion_protection" {
  description = "Whether Terraform refuses to destroy the cluster. Apply false first to be able to destroy it."
  type        = bool
  default     = true
}

variable "key_ring_name" {
  description = "Name of the KMS key ring; null: that of the fleet. Key rings cannot be deleted, so a fleet made again after a destroy needs a new one."
  type        = string
  default     = null

  validation {
    condition     = var.key_ring_name == null || can(regex("^[a-zA-Z0-9_-]{1,63}$", var.key_ring_name))
    error_message = "key_ring_name is 1 to 63 letters, digits, _ and -."
  }
}

variable "node_cidr" {
  description = "Addresses of nodes and load balancers inside the VPC."
  type        = string
  default     = "10.10.0.0/20"

  validation {
    condition     = can(cidrhost(var.node_cidr, 0))
    error_message = "node_cidr is a CIDR."
  }
}

variable "pod_cidr" {
  description = "Addresses of pods: a /24 of it goes to each node."
  type        = string
  default     = "10.20.0.0/16"

  validation {
    condition     = can(cidrhost(var.pod_cidr, 0))
    error_message = "pod_cidr is a CIDR."
  }
}

variable "service_cidr" {
  description = "Addresses of Kubernetes Services."
  type        = string
  default     = "10.30.0.0/20"

  validation {
    condition     = can(cidrhost(var.service_cidr, 0))
    error_message = "service_cidr is a CIDR."
  }
}

variable "control_plane_cidr" {
  description = "Addresses of the control plane: a /28 that overlaps nothing."
  type        = string
  default     = "172.16.0.16/28"

  validation {
    condition     = can(cidrhost(var.control_plane_cidr, 0)) && endswith(var.control_plane_cidr, "/28")
    error_message = "control_plane_cidr is a /28."
  }
}

variable "cpu_machine_type" {
  description = "Machines of ingress, placement, NATS and vaults. A vault wants memory: blocks live in it."
  type        = string
  default     = "n2-standard-8"
}

variable "cpu_nodes" {
  description = "Fewest and most CPU nodes in all zones together. NATS wants 3 nodes, to spread over."
  type        = object({ min = number, max = number })
  default     = { min = 3, max = 9 }

  validation {
    condition     = var.cpu_nodes.min >= 1 && var.cpu_nodes.max >= var.cpu_nodes.min
    error_message = "cpu_nodes: at least 1, and max not below min."
  }
}

variable "gpu_machine_type" {
  description = "Machines of workers; it must take gpu_type and gpu_count."
  type        = string
  default     = "g2-standard-12"
}

variable "gpu_type" {
  description = "Accelerator of each worker's node, as GKE calls it. The overlay gke-gpu selects nodes by it."
  type        = string
  default     = "nvidia-l4"

  validation {
    condition     = startswith(var.gpu_type, "nvidia-")
    error_message = "gpu_type is a GKE accelerator type, such as nvidia-l4 or nvidia-h100-80gb."
  }
}

variable "gpu_count" {
  description = "Accelerators in a node."
  type        = number
  default     = 1

  validation {
    condition     = contains([1, 2, 4, 8, 16], var.gpu_count)
    error_message = "gpu_count is 1, 2, 4, 8 or 16."
  }
}

variable "gpu_nodes" {
  description = "Fewest and most GPU nodes in all zones together. The overlay scales workers from 4 to 16."
  type        = object({ min = number, max = number })
  default     = { min = 0, max = 16 }

  validation {
    condition     = var.gpu_nodes.min >= 0 && var.gpu_nodes.max >= max(var.gpu_nodes.min, 1)
    error_message = "gpu_nodes: at least 0, and max at least 1 and not below min."
  }
}

variable "gpu_zones" {
  description = "Zones that have the accelerator (`gcloud compute accelerator-types list`). Empty: all of the cluster's."
  type        = list(string)
  default     = []
}

variable "gpu_spot" {
  description = "Spot machines for workers: cheaper, and taken away at 30 s notice. Streams survive that; the cache on it does not."
  type        = bool
  default     = false
}

variable "gpu_driver_version" {
  description = "Which NVIDIA driver GKE installs on the nodes."
  type        = string
  default     = "DEFAULT"

  validation {
    condition     = contains(["DEFAULT", "LATEST"], var.gpu_driver_version)
    error_message = "gpu_driver_version is DEFAULT or LATEST."
  }
}

variable "gpu_disk_size_gb" {
  description = "Boot disk of a GPU node: the image with CUDA libraries, and model weights in emptyDir volumes. GKE keeps up to 100 GiB and a tenth of it for itself."
  type        = number
  default     = 300

  validation {
    condition     = var.gpu_disk_size_gb >= 250
    error_message = "gpu_disk_size_gb is at least 250: of less GKE leaves no 100 GiB, which a worker asks for."
  }
}

variable "keda_service_account" {
  description = "NAMESPACE/NAME of KEDA's operator, which may read metrics of managed Prometheus; null: no such right is given."
  type        = string
  default     = "keda/keda-operator"

  validation {
    condition     = var.keda_service_account == null || can(regex("^[a-z0-9-]+/[a-z0-9-]+$", var.keda_service_account))
    error_message = "keda_service_account is NAMESPACE/NAME."
  }
}

variable "labels" {
  description = "Labels of everything that can carry some, for the bill."
  type        = map(string)
  default     = {}
}
