# The network: one VPC with one subnet. Nodes have no public addresses; what they fetch goes out through NAT.

resource "google_compute_network" "fleet" {
  project                 = var.project_id
  name                    = var.name
  auto_create_subnetworks = false
  routing_mode            = "REGIONAL"

  depends_on = [google_project_service.api]
}

resource "google_compute_subnetwork" "fleet" {
  project                  = var.project_id
  name                     = var.name
  region                   = var.region
  network                  = google_compute_network.fleet.id
  ip_cidr_range            = var.node_cidr
  private_ip_google_access = true # registry, logging and monitoring without going through NAT

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = var.pod_cidr
  }

  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = var.service_cidr
  }

  log_config {
    aggregation_interval = "INTERVAL_5_MIN"
    flow_sampling        = 0.1 # the data plane moves gigabytes: a tenth shows who talks to whom
    metadata             = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_router" "fleet" {
  project = var.project_id
  name    = var.name
  region  = var.region
  network = google_compute_network.fleet.id
}

resource "google_compute_router_nat" "fleet" {
  project                            = var.project_id
  name                               = var.name
  region                             = var.region
  router                             = google_compute_router.fleet.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"

  subnetwork {
    name                    = google_compute_subnetwork.fleet.id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

# GKE adds what it needs at priority 1000 (load balancer and control plane to nodes, pod to pod). The VPC denies the rest
# silently; this denies it and writes it down.
resource "google_compute_firewall" "deny_ingress" {
  project       = var.project_id
  name          = "${var.name}-deny-ingress"
  network       = google_compute_network.fleet.id
  direction     = "INGRESS"
  priority      = 65534
  source_ranges = ["0.0.0.0/0"]

  deny {
    protocol = "all"
  }

  log_config {
    metadata = "INCLUDE_ALL_METADATA"
  }
}

# The API server calls KEDA's metrics (6443) and webhooks (9443) on nodes; GKE itself lets it reach 443 and 10250 only.
resource "google_compute_firewall" "control_plane" {
  project                 = var.project_id
  name                    = "${var.name}-control-plane"
  network                 = google_compute_network.fleet.id
  direction               = "INGRESS"
  source_ranges           = [var.control_plane_cidr]
  target_service_accounts = [google_service_account.nodes.email]

  allow {
    protocol = "tcp"
    ports    = ["6443", "9443"]
  }
}

# The ingress Service's address: it outlives the Service, so DNS can point at it.
resource "google_compute_address" "ingress" {
  project      = var.project_id
  name         = "${var.name}-ingress"
  region       = var.region
  address_type = "EXTERNAL"
  labels       = local.labels

  depends_on = [google_project_service.api]
}
