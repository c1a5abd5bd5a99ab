# Where images come from.

resource "google_artifact_registry_repository" "images" {
  #checkov:skip=CKV_GCP_84:images hold no secrets and no weights; Google's encryption at rest is enough for them
  project       = var.project_id
  location      = var.region
  repository_id = var.name
  format        = "DOCKER"
  description   = "Images of ${var.name}"
  labels        = local.labels

  docker_config {
    immutable_tags = true # a tag that was deployed always means the same bytes
  }

  vulnerability_scanning_config {
    enablement_config = "INHERITED"
  }

  cleanup_policies {
    id     = "keep-recent"
    action = "KEEP"

    most_recent_versions {
      keep_count = 20
    }
  }

  cleanup_policies {
    id     = "delete-old"
    action = "DELETE"

    condition {
      older_than = "7776000s"
    }
  }

  depends_on = [google_project_service.api]
}
