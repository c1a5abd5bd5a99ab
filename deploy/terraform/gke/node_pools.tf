# Two pools: CPU nodes for ingress, placement, NATS and vaults; GPU nodes for workers alone.

resource "google_container_node_pool" "cpu" {
  project  = var.project_id
  name     = "cpu"
  cluster  = google_container_cluster.fleet.id
  location = var.region

  initial_node_count = 1 # in each zone

  autoscaling {
    total_min_node_count = var.cpu_nodes.min
    total_max_node_count = var.cpu_nodes.max
    location_policy      = "BALANCED"
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  upgrade_settings {
    strategy        = "SURGE"
    max_surge       = 1
    max_unavailable = 0
  }

  network_config {
    enable_private_nodes = true
  }

  node_config {
    machine_type    = var.cpu_machine_type
    image_type      = "COS_CONTAINERD"
    disk_type       = "pd-balanced"
    disk_size_gb    = 100
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"] # rights come from the account's roles
    labels          = { "kvfleet.dev/pool" = "cpu" }
    resource_labels = local.labels
    metadata        = { disable-legacy-endpoints = "true" }

    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }

    kubelet_config {
      insecure_kubelet_readonly_port_enabled = "FALSE"
    }

    gcfs_config {
      enabled = true
    }

    gvnic {
      enabled = true
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count] # the autoscaler's from the first day on
  }
}

resource "google_container_node_pool" "gpu" {
  project        = var.project_id
  name           = "gpu"
  cluster        = google_container_cluster.fleet.id
  location       = var.region
  node_locations = length(var.gpu_zones) > 0 ? var.gpu_zones : null

  initial_node_count = 0

  autoscaling {
    total_min_node_count = var.gpu_nodes.min
    total_max_node_count = var.gpu_nodes.max
    location_policy      = "ANY" # wherever there are accelerators today
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  # A node goes before its successor comes: accelerators are scarce, and workers hand their streams over.
  upgrade_settings {
    strategy        = "SURGE"
    max_surge       = 0
    max_unavailable = 1
  }

  network_config {
    enable_private_nodes = true
  }

  node_config {
    machine_type    = var.gpu_machine_type
    image_type      = "COS_CONTAINERD"
    disk_type       = "pd-balanced"
    disk_size_gb    = var.gpu_disk_size_gb
    spot            = var.gpu_spot
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = { "kvfleet.dev/pool" = "gpu" }
    resource_labels = local.labels
    metadata        = { disable-legacy-endpoints = "true" }

    guest_accelerator {
      type  = var.gpu_type
      count = var.gpu_count

      gpu_driver_installation_config {
        gpu_driver_version = var.gpu_driver_version
      }
    }

    # Only what tolerates it comes here: a node that costs this much runs workers.
    taint {
      key    = "nvidia.com/gpu"
      value  = "present"
      effect = "NO_SCHEDULE"
    }

    shielded_instance_config {
      enable_secure_boot          = true # the drivers that GKE installs on this image are signed
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }

    kubelet_config {
      insecure_kubelet_readonly_port_enabled = "FALSE"
    }

    gcfs_config {
      enabled = true # a worker starts while its image of several GB still comes
    }

    gvnic {
      enabled = true
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}
