# What scripts/quickstart_gke and scripts/deploy_gke go on with.

output "cluster_name" {
  description = "For `gcloud container clusters get-credentials`."
  value       = google_container_cluster.fleet.name
}

output "region" {
  description = "Where the cluster is."
  value       = var.region
}

output "private_endpoint" {
  description = "Whether kubectl needs `get-credentials --internal-ip`."
  value       = var.private_endpoint
}

output "registry" {
  description = "Prefix of image names, for `build_images --push` and `deploy_gke --images`."
  value       = "${var.region}-docker.pkg.dev/${var.project_id}/${google_artifact_registry_repository.images.repository_id}"
}

output "ingress_address" {
  description = "The address that the ingress Service takes: point DNS here."
  value       = google_compute_address.ingress.address
}

output "gpu_type" {
  description = "Accelerator that workers must select nodes by."
  value       = var.gpu_type
}

output "secrets_key" {
  description = "The KMS key that Kubernetes Secrets are encrypted with."
  value       = google_kms_crypto_key.secrets.id
}
