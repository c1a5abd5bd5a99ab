# The project: the APIs that this needs switched on, and names that others build on.

data "google_project" "this" {
  project_id = var.project_id
}

resource "google_project_service" "api" {
  for_each = toset([
    "artifactregistry.googleapis.com",
    "binaryauthorization.googleapis.com",
    "cloudkms.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "containerfilesystem.googleapis.com", # image streaming
    "iam.googleapis.com",
    "logging.googleapis.com",
    "monitoring.googleapis.com",
  ])

  project            = var.project_id
  service            = each.value
  disable_on_destroy = false # others in the project may use them
}

locals {
  labels = merge(var.labels, { app = "kvfleet", fleet = var.name })
  # GKE's own agent: encrypts Secrets with our key.
  gke_agent     = "service-${data.google_project.this.number}@container-engine-robot.iam.gserviceaccount.com"
  workload_pool = "${var.project_id}.svc.id.goog"
}
