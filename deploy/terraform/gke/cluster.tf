# The cluster: regional, VPC-native, private nodes, workload identity, Secrets encrypted with our key.

resource "google_container_cluster" "fleet" {
  #checkov:skip=CKV_GCP_12:Dataplane V2 enforces NetworkPolicies by itself, and refuses the network_policy block
  #checkov:skip=CKV_GCP_21:the labels are in local.labels, whose value the scanner does not work out
  #checkov:skip=CKV_GCP_65:Google Groups for RBAC need an organisation's group; set authenticator_groups_config where there is one
  project    = var.project_id
  name       = var.name
  location   = var.region
  network    = google_compute_network.fleet.id
  subnetwork = google_compute_subnetwork.fleet.id

  deletion_protection = var.deletion_protection
  resource_labels     = local.labels

  # Nodes live in the pools of node_pools.tf. The first pool, made and removed with the cluster, takes these settings.
  remove_default_node_pool = true
  initial_node_count       = 1

  node_config {
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]

    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = var.private_endpoint
    master_ipv4_cidr_block  = var.control_plane_cidr
  }

  master_authorized_networks_config {
    gcp_public_cidrs_access_enabled = false # by default everyone's machines at Google would be let in

    dynamic "cidr_blocks" {
      for_each = var.authorized_networks

      content {
        display_name = cidr_blocks.key
        cidr_block   = cidr_blocks.value
      }
    }
  }

  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  networking_mode             = "VPC_NATIVE"
  datapath_provider           = "ADVANCED_DATAPATH" # Dataplane V2: enforces NetworkPolicies
  enable_intranode_visibility = true
  enable_shielded_nodes       = true
  enable_legacy_abac          = false

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }

  workload_identity_config {
    workload_pool = local.workload_pool
  }

  database_encryption {
    state    = "ENCRYPTED"
    key_name = google_kms_crypto_key.secrets.id
  }

  # The project's policy decides which images run; a project without one admits all. It belongs to the whole project, so it
  # is not made here: see README.md.
  binary_authorization {
    evaluation_mode = "PROJECT_SINGLETON_POLICY_ENFORCE"
  }

  release_channel {
    channel = var.release_channel
  }

  maintenance_policy {
    daily_maintenance_window {
      start_time = "03:00"
    }
  }

  security_posture_config {
    mode = "BASIC"
  }

  # Managed Prometheus reads the PodMonitoring objects of the overlay gke-gpu.
  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS", "STORAGE", "POD", "DEPLOYMENT", "STATEFULSET", "HPA"]

    managed_prometheus {
      enabled = true
    }
  }

  logging_config {
    enable_components = ["SYSTEM_COMPONENTS", "WORKLOADS", "APISERVER"]
  }

  addons_config {
    gce_persistent_disk_csi_driver_config {
      enabled = true # volumes of NATS and vaults
    }

    horizontal_pod_autoscaling {
      disabled = false # ingress
    }

    http_load_balancing {
      disabled = false
    }
  }

  lifecycle {
    ignore_changes = [node_config] # that of the removed pool: a difference would replace the cluster
  }

  depends_on = [
    google_kms_crypto_key_iam_member.gke,
    google_project_iam_member.nodes,
    google_compute_router_nat.fleet,
  ]
}
