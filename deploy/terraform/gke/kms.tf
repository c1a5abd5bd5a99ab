# Keys: Kubernetes Secrets lie encrypted under a key of the fleet in etcd, below Google's own encryption at rest.

resource "google_kms_key_ring" "fleet" {
  project  = var.project_id
  name     = coalesce(var.key_ring_name, var.name)
  location = var.region

  depends_on = [google_project_service.api]
}

resource "google_kms_crypto_key" "secrets" {
  #checkov:skip=CKV_GCP_82:prevent_destroy would keep a trial fleet from ever being destroyed; a destroyed version can be restored for 30 days
  name                       = "secrets"
  key_ring                   = google_kms_key_ring.fleet.id
  rotation_period            = "7776000s" # 90 days
  destroy_scheduled_duration = "2592000s" # 30 days
  labels                     = local.labels
}

resource "google_kms_crypto_key_iam_member" "gke" {
  crypto_key_id = google_kms_crypto_key.secrets.id
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${local.gke_agent}"
}
