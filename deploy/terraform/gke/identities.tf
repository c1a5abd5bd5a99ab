# Who may do what. Nodes get the least that a node needs; pods of the fleet get nothing: they speak to NATS and one another.

resource "google_service_account" "nodes" {
  project      = var.project_id
  account_id   = "${var.name}-nodes"
  display_name = "Nodes of ${var.name}"

  depends_on = [google_project_service.api]
}

# Google's role for exactly this: write logs and metrics, read autoscaling metrics.
resource "google_project_iam_member" "nodes" {
  project = var.project_id
  role    = "roles/container.defaultNodeServiceAccount"
  member  = google_service_account.nodes.member
}

# Images: of this one repository.
resource "google_artifact_registry_repository_iam_member" "nodes" {
  project    = var.project_id
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}

# KEDA asks managed Prometheus for kvfleet_model_desired_replicas, as its Kubernetes service account: no key exists.
resource "google_project_iam_member" "keda" {
  count = var.keda_service_account == null ? 0 : 1

  project = var.project_id
  role    = "roles/monitoring.viewer"
  member = format(
    "principal://iam.googleapis.com/projects/%s/locations/global/workloadIdentityPools/%s/subject/ns/%s/sa/%s",
    data.google_project.this.number, local.workload_pool, split("/", var.keda_service_account)[0], split("/", var.keda_service_account)[1],
  )

  depends_on = [google_container_cluster.fleet] # the workload pool exists with the first cluster
}
